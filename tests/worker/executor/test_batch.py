"""The rows of a batch: which row of the logits draws or scores which token of which sequence."""

from struct import pack, unpack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.logprobs import join_prompt_logprobs
from wire.options import Options
from worker.executor.batch import Batch, BatchType, PromptScores, Row, Sampling, Scoring, rows_of


def test_a_sampling_has_a_row_more_than_drafts() -> None:
    first = Sampling(1, Options(), 6, 6, list(range(6)), None, (71, 72))
    last = Sampling(3, Options(), 3, 3, list(range(3)))
    rows = rows_of([first, last])
    assert [(row.index, row.position) for row in rows] == [(0, 6), (1, 7), (2, 8), (3, 3)]
    assert rows_of([first, last], lambda it: it is last) == [Row(3, last, 0)]


def test_rows_belong_to_the_sequence_whose_tokens_they_are() -> None:
    none = np.zeros(0, np.int32)
    first, second = PromptScores(3, 0), PromptScores(2, 0)
    batch = Batch(
        kind=BatchType.PREFILL,
        token_ids=np.array([5, 6, 7, 8, 9, 4], np.int32),
        positions=none,
        slots=none,
        query_starts=np.array([0, 2, 3, 6], np.int32),
        context_lens=none,
        block_tables=none,
        sample_rows=np.array([1, 2, 3, 5], np.int32),
        samplings=(),
        scorings=(Scoring(first, [6, 7], 0), Scoring(second, [9], 0)),
    )
    assert [batch.sequence_of(row) for row in range(4)] == [0, 1, 2, 2]
    batch.keep_scores([b"row1row2", b"row3"])
    assert first.packed() == join_prompt_logprobs(0, [b"row1", b"row2"])
    assert second.packed() == join_prompt_logprobs(0, [b"row3"])
    assert not first.wanted(0, 3) and not second.wanted(0, 2)


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
