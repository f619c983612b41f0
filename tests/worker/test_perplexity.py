"""Weights in 8 bits cost a hundredth of the perplexity at most, on text that was not learned."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from scripts.models import stories
from scripts.models.make_model import make_model
from tests.worker.paged import Text, batch_of
from wire.process.model import DEMO
from worker.executor.torch import TorchExecutor

BLOCK_SIZE, NUM_BLOCKS = 16, 40
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def texts(seed: int, count: int) -> list[list[int]]:
    draw = Random(seed)
    return [TOKENIZER.encode(stories.make_story(draw).text).ids[:500] for _ in range(count)]


def perplexity(path: Path, **settings: Any) -> float:
    executor = TorchExecutor.load(path, name="held out", device="cpu", **settings)
    executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    losses = []
    for ids in texts(seed=1, count=20):
        batch = batch_of([(Text(ids, list(range(NUM_BLOCKS))), len(ids))], BLOCK_SIZE)
        logits = executor.forward(replace(batch, sample_rows=np.arange(len(ids), dtype=np.int32)))
        losses.append(
            torch.nn.functional.cross_entropy(
                logits[:-1].double(), torch.tensor(ids[1:]), reduction="none"
            )
        )
    return math.exp(torch.cat(losses).mean())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another family, its head apart, that learned stories for some seconds."""
    from transformers import AutoModelForCausalLM

    vocab_size = TOKENIZER.get_vocab_size()
    path = make_model(tmp_path_factory.mktemp("trained"), family="qwen2", vocab_size=vocab_size)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    stream = torch.tensor([token for ids in texts(seed=2, count=300) for token in ids])
    for step in range(150):
        start = step * 512 % (len(stream) - 512)
        ids = stream[start : start + 512].view(8, 64)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("demo", "bfloat16"),
        ("demo", "float32"),
        pytest.param("trained", "bfloat16", marks=pytest.mark.full("it trains a model")),
    ],
)
def test_a_held_out_text_is_as_likely(
    name: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    path = DEMO if name == "demo" else request.getfixturevalue(name)
    whole = perplexity(path, dtype=dtype)
    assert whole < 40  # of 1326 tokens: there is something to lose
    rounded = perplexity(path, dtype=dtype, weights="int8")
    assert rounded < 1.01 * whole
