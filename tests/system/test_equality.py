"""Disaggregated greedy output equals `transformers` generate, token for token, fp32.

Through HTTP, the router, a prefill worker, ZeroMQ and a decode worker, on small random checkpoints
of every family, with equal and with different block sizes on the two sides.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from scripts.models.make_model import make_model
from tests.cluster import Cluster

PROMPT_LENGTHS = (1, 15, 16, 17, 200, 700)
NUM_TOKENS = 64
# Where the two best logits are closer than float32 sums can tell, both tokens are right.  About one
# prompt in a hundred comes that close.
MIN_MARGIN = 1e-4
MAX_DRAWS = 10
VOCAB_SIZE = 512

# family, query heads, KV heads, prefill block size, decode block size
CASES = [
    ("llama", 4, 4, 16, 16),
    ("llama", 6, 2, 8, 32),
    ("mistral", 4, 1, 16, 16),
    ("mistral", 4, 2, 32, 16),
    ("qwen2", 4, 2, 16, 16),
    ("qwen2", 6, 3, 16, 8),
    ("qwen3", 8, 2, 16, 16),
    ("qwen3", 4, 4, 64, 16),
    ("qwen3_moe", 4, 2, 16, 8),
    ("gpt_oss", 4, 2, 16, 8),
    ("gemma3_text", 4, 2, 16, 32),
]


class Expected(NamedTuple):
    """A prompt, and what `transformers` generates from it."""

    prompt: list[int]
    tokens: list[int]


def expectations(directory: Path, draw: random.Random) -> list[Expected]:
    """Draw a prompt of each length whose every token wins by MIN_MARGIN on this processor.

    How a sum rounds depends on the instruction set, so whether two logits are too near does too.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return [expectation(model, length, draw) for length in PROMPT_LENGTHS]


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


@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations are not our subject
@pytest.mark.parametrize(("family", "heads", "kv_heads", "prefill_block", "decode_block"), CASES)
def test_greedy_output_equals_transformers(
    tmp_path: Path, family: str, heads: int, kv_heads: int, prefill_block: int, decode_block: int
) -> None:
    model = tmp_path / f"{family}-{kv_heads}"
    make_model(
        model,
        family=family,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=16 * heads,
        vocab_size=VOCAB_SIZE,
        seed=kv_heads,
    )
    draw = random.Random(f"{family} {heads}")
    expected = expectations(model, draw)

    with Cluster(tmp_path, local="0,0", model=str(model)) as cluster:
        cluster.worker("prefill", 0, "--block-size", str(prefill_block), "--dtype", "float32")
        cluster.worker("decode", 0, "--block-size", str(decode_block), "--dtype", "float32")
        body = {
            "model": cluster.model,
            "prompt": [it.prompt for it in expected],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        for choice, it in zip(choices, expected, strict=True):
            assert choice["token_ids"] == it.tokens, f"prompt of {len(it.prompt)} tokens"
        cluster.until_idle()
