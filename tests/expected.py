"""Texts that `transformers` generates from random prompts, where every token wins clearly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

PROMPT_LENGTHS = (1, 15, 16, 17, 200, 700)
NUM_TOKENS = 40  # more than a block of any test
# Where the two best logits are closer than float32 sums can tell, both tokens are right.  About one
# prompt in a hundred comes that close.
MIN_MARGIN = 1e-4
MAX_DRAWS = 10
VOCAB_SIZE = 512


class Expected(NamedTuple):
    """A prompt, and what `transformers` generates from it."""

    prompt: list[int]
    tokens: list[int]


def expectations(
    directory: Path, draw: random.Random, lengths: Sequence[int] = PROMPT_LENGTHS
) -> list[Expected]:
    """Draw a prompt of each length whose every token wins by MIN_MARGIN on this processor.

    How a sum rounds depends on the instruction set, so whether two logits are too near does too.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return [expectation(model, length, draw) for length in lengths]


def expectation(model: Any, length: int, draw: random.Random) -> Expected:
    margins = []
    for _ in range(MAX_DRAWS):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(length)]
        tokens, margin = generated(model, prompt)
        if margin > MIN_MARGIN:
            return Expected(prompt, tokens)
        margins.append(margin)
    raise AssertionError(f"{length} tokens: no prompt has the margin, only {margins}")


def generated(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """Return the greedy tokens, and by how much the closest of them won."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        logits = model(output).logits[0, len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.T
    return output[0, len(prompt) :].tolist(), float((best - second).min())
