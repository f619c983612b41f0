"""Penalties and biases equal a plain NumPy reference, row by row, and cost nothing unasked."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.options import Options
from worker.executor.batch import Sampling
from worker.executor.penalties import adjust
from worker.executor.token_counts import Occurrences

VOCAB = 24
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def plain(row: npt.NDArray[np.float32], it: Sampling) -> npt.NDArray[np.float32]:
    """SPEC 4.8, word by word."""
    options, result = it.options, row.astype(np.float64)
    generated = Counter(it.token_ids[it.prompt_len :])
    for token_id in set(it.token_ids):
        value = result[token_id]
        penalty = options.repetition_penalty
        value = value / penalty if value > 0 else value * penalty
        if generated[token_id]:
            value -= generated[token_id] * options.frequency_penalty + options.presence_penalty
        result[token_id] = value
    if options.has_penalties:
        result = result.astype(np.float32).astype(np.float64)
    biases = Counter[int]()
    for token_id, bias in options.logit_bias:
        biases[token_id] += bias  # type: ignore[assignment]
    for token_id, bias in biases.items():
        if token_id < VOCAB:
            result[token_id] += bias
    return result.astype(np.float32)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    prompt, answer = draw(TOKENS), draw(TOKENS)
    off = st.just(0.0)
    options = Options(
        repetition_penalty=draw(st.just(1.0) | st.floats(0.01, 100)),
        presence_penalty=draw(off | st.floats(-2, 2)),
        frequency_penalty=draw(off | st.floats(-2, 2)),
        logit_bias=tuple(
            draw(st.lists(st.tuples(st.integers(0, VOCAB + 5), st.floats(-100, 100)), max_size=6))
        ),
    )
    token_ids = prompt + answer
    kept = None
    if draw(st.booleans()):
        kept = Occurrences(token_ids[: draw(st.integers(len(prompt), len(token_ids)))], len(prompt))
    return Sampling(1, options, len(token_ids), len(prompt), token_ids, kept)


def logits_of(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 5


@settings(max_examples=60)
@given(batch=st.lists(samplings(), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_adjusted_logits_are_the_references(batch: list[Sampling], seed: int) -> None:
    logits = logits_of(len(batch), seed)
    before = logits.clone()
    adjusted = adjust(logits, batch)
    assert torch.equal(logits, before), "what others read is not changed"
    for row, it in enumerate(batch):
        expected = plain(before[row].numpy(), it)
        np.testing.assert_allclose(adjusted[row].numpy(), expected, rtol=3e-7, atol=1e-5)


DRAFTED = st.tuples(samplings(), st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple))


@settings(max_examples=60)
@given(batch=st.lists(DRAFTED, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_rows_after_drafts_are_those_of_the_texts_with_them(
    batch: list[tuple[Sampling, tuple[int, ...]]], seed: int
) -> None:
    """Bit by bit, whether occurrences were kept or not."""
    drafted = [msgspec.structs.replace(it, drafts=drafts) for it, drafts in batch]
    alone = [
        msgspec.structs.replace(it, token_ids=[*it.token_ids, *drafts[:d]], occurrences=None)
        for it, drafts in batch
        for d in range(len(drafts) + 1)
    ]
    logits = logits_of(len(alone), seed)
    assert torch.equal(adjust(logits, drafted), adjust(logits, alone))
    # The next step finds what is kept as if no drafts had been there.
    fewer = logits[: len(batch)]
    expected = adjust(fewer, [msgspec.structs.replace(it, occurrences=None) for it, _ in batch])
    assert torch.equal(adjust(fewer, [it for it, _ in batch]), expected)


def asked(token_ids: list[int], prompt_len: int, **options: Any) -> Sampling:
    return Sampling(1, Options(**options), len(token_ids), prompt_len, token_ids)


def test_logits_without_penalties_are_not_copied() -> None:
    logits = logits_of(2, 0)
    assert adjust(logits, [asked([1, 2, 3], 2), asked([], 0, temperature=1.0)]) is logits
