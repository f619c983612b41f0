"""Borders found digit by digit are those of a sort; the rest is in `test_sampler.py`."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import SAMPLING, reference
from kernels.contract import Backend
from kernels.cpu import backend as cpu

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def sample(
    logits: torch.Tensor,
    rows: npt.NDArray[np.void],
    allowed: npt.NDArray[np.int32] | None = None,
    serving: Backend = cpu,
) -> list[int]:
    settings = torch.from_numpy(np.ascontiguousarray(rows).view(np.int64).reshape(len(rows), -1))
    bits = None if allowed is None else torch.from_numpy(allowed)
    drawn: list[int] = serving.draw(logits, settings, bits).tolist()
    return drawn


def settings_of(numbers: npt.ArrayLike, **changes: float) -> npt.NDArray[np.void]:
    """Return a row's settings for each number that decides."""
    numbers = np.asarray(numbers)
    rows = np.empty(len(numbers), SAMPLING)
    for name, value in {**PLAIN, **changes}.items():
        rows[name] = value
    rows["uniform"] = numbers
    return rows


def sampled(logits: list[float], **changes: float) -> set[int]:
    """Return every token that is sampled, for numbers that leave none out."""
    numbers = np.append(np.linspace(0, 1, 4000, endpoint=False), 1 - 2.0**-52)
    rows = torch.tensor(logits).expand(len(numbers), -1)
    return set(sample(rows, settings_of(numbers, **changes)))


# Few values, and as near as float32 has them: ties, and borders that only the last digit tells.
near = st.sampled_from(
    [1.0, math.nextafter(1.0, 2.0) + 1e-7, 1.0 + 3e-7, 0.5, 0.0, -1.0, -math.inf]
)


@settings(max_examples=60)
@given(logits=st.lists(near, max_size=30), top_k=st.integers(1, 12), top_p=st.floats(0.001, 0.999))
def test_filters_keep_what_a_sort_would(logits: list[float], top_k: int, top_p: float) -> None:
    logits = [1.0, *logits]
    weights = torch.tensor(logits).double().sub(max(torch.tensor(logits))).exp()
    ranked = weights.sort(descending=True).values
    for border, changes in (
        (ranked[min(top_k, len(logits)) - 1], {"top_k": top_k}),
        (ranked[int((ranked.cumsum(0) < top_p * ranked.sum()).sum())], {"top_p": top_p}),
    ):
        kept = (weights >= border) & (weights > 0)
        found = sampled(logits, **changes)
        assert found <= set(kept.nonzero()[:, 0].tolist())
        # Of equal tokens all are kept, so each has a share that is met.
        assert found >= {i for i in kept.nonzero()[:, 0].tolist() if weights[i] > 0.1}


@pytest.mark.parametrize("size", [1, 511, 512, 513, 5000])
def test_the_place_is_found_across_parts(size: int) -> None:
    logits = torch.full((size, size), -math.inf)
    logits.fill_diagonal_(3.0)
    for number in (0.0, 0.5, 1 - 2.0**-52):
        assert sample(logits, settings_of([number] * size)) == list(range(size))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_largest_keeps_to_the_vocabulary(broken: float) -> None:
    for part in (1, 600):
        logits = torch.zeros(1, 600)
        logits[0, :part] = broken
        for changes in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}):
            assert all(0 <= token < 600 for token in sampled(logits[0].tolist(), **changes))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("num_words", [1, 2, 7])
def test_a_token_is_chosen_among_the_allowed(vocab: int, num_words: int) -> None:
    draw = np.random.default_rng(vocab * num_words)
    allowed = draw.integers(-(2**31), 2**31, (40, num_words)).astype(np.int32)
    allowed[1, :], allowed[2, :] = -1, 0
    logits, rows = torch.randn(40, vocab), settings_of(draw.random(40))
    rows["temperature"][::3] = 0
    rows["top_k"][::4] = 3
    bits = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    is_allowed = np.pad(bits, ((0, 0), (0, vocab - bits.shape[1]))).astype(bool)
    without = logits.masked_fill(torch.from_numpy(~is_allowed), -math.inf)
    expected = sample(without, rows)
    for row in np.flatnonzero(~is_allowed.any(axis=1)):
        expected[row] = -1
    assert expected[2] == -1
    assert sample(logits, rows, allowed) == expected
    assert sample(logits, rows, allowed, reference) == expected
