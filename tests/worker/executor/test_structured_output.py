"""Where an answer is in its structure is a function of its tokens: replayed, ahead, and back."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from tests.worker.executor.structures import (
    EOS,
    PROMPT,
    STRUCTURES,
    allowed_by_force,
    allowed_in,
    asked,
    begun,
    mask_of,
    masks_of,
    walk,
)
from wire.options import Structure
from worker.executor.structured_output import Structured

EVERY = pytest.mark.parametrize("structure", STRUCTURES, ids=lambda it: it.kind)


@EVERY
def test_masks_equal_validating_each_token(structure: Structure) -> None:
    for seed in range(3):
        answer = walk(structure, seed, limit=25)
        structured = begun(structure)
        for end in range(len(answer) + 1):
            row = mask_of(structured, answer[:end])[0]
            assert allowed_in(row) == allowed_by_force(structure, answer[:end])


@EVERY
def test_drafts_are_looked_along_and_forgotten(structure: Structure) -> None:
    answer = walk(structure, 3)
    structured = begun(structure)
    for end in range(0, len(answer), 4):
        drafts = answer[end : end + 5]
        rows = mask_of(structured, answer[:end], drafts)
        for number, row in enumerate(rows):
            assert allowed_in(row) == allowed_by_force(structure, answer[: end + number])


@EVERY
def test_a_mask_made_outside_of_a_step_is_taken_by_every_step_until_the_text_goes_on(
    structure: Structure,
) -> None:
    answer = walk(structure, 5)
    structured = begun(structure)
    for end in range(1, len(answer) + 1):
        structured.make_mask([*PROMPT, *answer[:end]])
        structured.wait(60)
        assert structured.is_ready
        for _ in range(2):  # a step that fails is computed again
            assert allowed_in(mask_of(structured, answer[:end])[0]) == allowed_by_force(
                structure, answer[:end]
            )
        for number, row in enumerate(mask_of(structured, answer[:end], answer[end : end + 2])):
            assert allowed_in(row) == allowed_by_force(structure, answer[: end + number])
    structured.rewind(len(PROMPT))
    assert allowed_in(mask_of(structured, [])[0]) == allowed_by_force(structure, [])


def test_a_text_is_not_ready_while_its_mask_is_made_and_its_end_cancels_that() -> None:
    made: Future[Any] = Future()
    compiled: Future[Any] = Future()
    compiled.set_result(None)
    structured = Structured(compiled, 0, lambda _: made)
    assert structured.is_ready
    structured.make_mask([1])
    assert not structured.is_ready
    structured.cancel()
    assert made.cancelled() and structured.is_ready


@pytest.mark.parametrize("wrong", [11, EOS[0]])
def test_rows_after_a_forbidden_draft_are_not_written(wrong: int) -> None:
    structure = STRUCTURES[0]
    answer = walk(structure, 4)
    structured = begun(structure)
    rows = mask_of(structured, answer[:3], [answer[3], wrong, answer[4]])
    assert allowed_in(rows[1]) == allowed_by_force(structure, answer[:4])
    assert (rows[2:] == -1).all()
    assert allowed_in(mask_of(structured, answer[:4])[0]) == allowed_by_force(structure, answer[:4])


@EVERY
def test_a_draft_models_text_is_cut_anywhere(structure: Structure) -> None:
    answer = [*walk(structure, 5), EOS[1], EOS[0], 9]  # it goes on after EOS
    structured = begun(structure)
    for end in (*range(len(answer), 0, -3), len(answer), 0):
        structured.rewind(len(PROMPT) + end)
        row = mask_of(structured, answer[:end])[0]
        fresh = mask_of(begun(structure), answer[:end])[0]
        assert (row == fresh).all()


def test_a_text_that_is_not_its_structures_is_a_problem() -> None:
    structured = begun(STRUCTURES[1])
    masks_of([asked(structured, [300])])
    assert structured.problem is not None and structured.problem.startswith("structure: ")
    assert "Tokens" not in structured.problem, "the answers of others are in the same memory"
