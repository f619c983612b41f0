"""A prompt's scores are gathered once each, whatever the chunks."""

from __future__ import annotations

from struct import pack, unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.executor.prompt_logprobs import PromptScores


def row(position: int) -> bytes:
    return pack("<fIf", -position, position + 1, -0.5)


@given(num_tokens=st.integers(1, 60), data=st.data())
def test_every_position_but_the_last_is_scored_once(num_tokens: int, data: st.DataObject) -> None:
    subject = PromptScores(num_tokens, 1)
    asked: list[int] = []
    start = 0
    while start < num_tokens:
        count = data.draw(st.integers(1, num_tokens - start))
        wanted = subject.wanted(start, count)
        asked += wanted
        if wanted:
            subject.add(len(wanted), b"".join(map(row, wanted)))
        start += count
        if data.draw(st.booleans()):  # preempted: some of it, or all, is computed again
            start = data.draw(st.integers(0, min(start, subject.num_scored)))
    assert asked == list(range(num_tokens - 1))
    assert subject.packed() == pack("<I", 1) + b"".join(map(row, asked))


@pytest.mark.parametrize(("num_top", "actual"), [(20, 3), (3, 3), (0, 0)])
def test_no_more_tops_than_there_are_tokens(num_top: int, actual: int) -> None:
    subject = PromptScores(3, num_top)
    subject.add(2, bytes(2 * (4 + 8 * actual)))
    assert unpack("<I", subject.packed()[:4]) == (actual,)


def test_a_prompt_of_one_token_has_none() -> None:
    subject = PromptScores(1, 5)
    assert not subject.wanted(0, 1)
    assert subject.packed() == pack("<I", 5)
