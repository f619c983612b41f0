"""What may not be drawn is not: the order of the options, and that rows keep to themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from wire.options import Options
from worker.executor.batch import Sampling
from worker.executor.grammars import Masks
from worker.executor.masks import mask
from worker.executor.sampler import NoTokenLeft, sample

VOCAB, EOS = 40, frozenset({3})


def asked(answer: list[int], drafts: tuple[int, ...] = (), **options: Any) -> Sampling:
    prompt = [8, 9]
    token_ids = [*prompt, *answer]
    return Sampling(1, Options(**options), len(token_ids), len(prompt), token_ids, None, drafts)


def left(samplings: list[Sampling], structures: Masks | None = None) -> list[list[int]]:
    """The tokens that are left in each row."""
    num_rows = sum(1 + len(it.drafts) for it in samplings)
    logits = torch.randn(num_rows, VOCAB)
    before = logits.clone()
    masked = mask(logits, samplings, EOS, structures)
    assert (logits == before).all(), "the caller's logits are left alone"
    kept = masked > -torch.inf
    assert (masked[kept] == before[kept]).all()
    return [row.nonzero()[:, 0].tolist() for row in kept]


def masks_of(*allowed: list[int], rows: list[int], over: list[bool]) -> Masks:
    bits = np.zeros((len(allowed), 2), np.int32)
    for row, token_ids in zip(bits, allowed, strict=True):
        for token_id in token_ids:
            row.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
    return Masks(rows, bits, [row for row, is_over in zip(rows, over, strict=True) if is_over])


ALL = list(range(VOCAB))


def without(*token_ids: int) -> list[int]:
    return [token_id for token_id in ALL if token_id not in token_ids]


def test_nothing_is_copied_where_nobody_asks() -> None:
    logits = torch.randn(2, VOCAB)
    assert mask(logits, [asked([]), asked([5])], EOS) is logits


def test_only_allowed_tokens_are_left_in_that_row() -> None:
    some = asked([], allowed_token_ids=(5, 7, 7, 2_000_000_000))
    assert left([asked([]), some]) == [ALL, [5, 7]]


@pytest.mark.parametrize(
    ("answer", "out"),
    [([], (4,)), ([5], (4, 6)), ([5, 6], (4, 7)), ([6, 5], (4, 6)), ([5, 6, 7], (4,))],
)
def test_no_token_completes_a_bad_sequence(answer: list[int], out: tuple[int, ...]) -> None:
    it = asked(answer, bad_sequences=((4,), (5, 6), (5, 6, 7), (9, 1), (2_000_000_000,)))
    assert left([it]) == [without(*out)], "the prompt, which ends with 9, does not count"


def test_drafts_count_as_generated() -> None:
    it = asked([5], (6, 1), bad_sequences=((5, 6), (5, 6, 7)))
    assert left([it]) == [without(6), without(7), ALL]


def test_min_tokens_and_structures_take_out_what_is_left() -> None:
    it = asked([], (5,), min_tokens=1, allowed_token_ids=(3, 5, 6, 39), stop_token_ids=(6,))
    structures = masks_of([3, 5, 7, 39], [3, 5, 6], rows=[1, 2], over=[False, False])
    assert left([asked([]), it], structures) == [ALL, [5, 39], [3, 5, 6]]


def test_where_only_eos_may_follow_nothing_else_counts() -> None:
    it = asked([], min_tokens=9, allowed_token_ids=(5,), bad_sequences=((3,),))
    assert left([it], masks_of([3], rows=[0], over=[True])) == [[3]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_is_named(temperature: float) -> None:
    fine = asked([], temperature=temperature)
    empty = asked([], (1,), temperature=temperature, allowed_token_ids=(4,), bad_sequences=((4,),))
    with pytest.raises(NoTokenLeft) as caught:
        sample(torch.randn(3, VOCAB), [fine, empty], EOS)
    assert caught.value.row == 1
