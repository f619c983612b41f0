"""Masked tokens are never drawn: the order of the options, and the independence of rows."""

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


def left(samplings: list[Sampling], over: tuple[int, ...] = ()) -> list[list[int]]:
    """The tokens that are left in each row."""
    num_rows = sum(1 + len(it.drafts) for it in samplings)
    logits = torch.randn(num_rows, VOCAB)
    before = logits.clone()
    masked = mask(logits, samplings, EOS, over)
    assert (logits == before).all(), "the caller's logits are left alone"
    kept = masked > -torch.inf
    assert (masked[kept] == before[kept]).all()
    return [row.nonzero()[:, 0].tolist() for row in kept]


def masks_of(*allowed: list[int], over: tuple[int, ...] = ()) -> Masks:
    bits = np.zeros((len(allowed), 2), np.int32)
    for row, token_ids in zip(bits, allowed, strict=True):
        for token_id in token_ids:
            row.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
    return Masks(bits, list(over))


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


def test_min_tokens_take_out_what_would_end() -> None:
    it = asked([], (5,), min_tokens=1, allowed_token_ids=(3, 5, 6, 39), stop_token_ids=(6,))
    assert left([asked([]), it]) == [ALL, [5, 39], [3, 5, 6, 39]]


def test_a_structure_that_allows_eos_only_overrides_the_options() -> None:
    it = asked([], min_tokens=9, allowed_token_ids=(5,), bad_sequences=((3,),))
    assert left([it, it], over=(1,)) == [[5], ALL]
    [token] = sample(torch.randn(1, VOCAB), [it], EOS, masks_of([3], over=(0,)))
    assert token.token_id == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_is_drawn_where_options_and_structure_leave_one(temperature: float) -> None:
    it = asked([], (5,), temperature=temperature, allowed_token_ids=(5, 6, 39))
    free = asked([], temperature=temperature)
    structures = masks_of(ALL, [4, 7, 39], [6, 3])
    logits = torch.randn(3, VOCAB)
    tokens = [token.token_id for token in sample(logits, [free, it], EOS, structures)]
    assert tokens[0] == sample(logits[:1], [free], EOS)[0].token_id
    assert tokens[1:] == [39, 6]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_is_named(temperature: float) -> None:
    fine = asked([], temperature=temperature)
    empty = asked([], (1,), temperature=temperature, allowed_token_ids=(4,), bad_sequences=((4,),))
    with pytest.raises(NoTokenLeft) as caught:
        sample(torch.randn(3, VOCAB), [fine, empty], EOS)
    assert caught.value.row == 1


@pytest.mark.parametrize("options", [{"allowed_token_ids": (4, 5)}, {"bad_sequences": ((6,),)}])
def test_a_row_whose_options_and_structure_exclude_each_other_is_named(
    options: dict[str, Any],
) -> None:
    it = asked([], (1,), **options)
    for allowed in ([6], []):
        with pytest.raises(NoTokenLeft) as caught:
            sample(torch.randn(2, VOCAB), [it], EOS, masks_of([4], allowed))
        assert caught.value.row == 1
