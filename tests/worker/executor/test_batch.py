"""Rows of samplings: which row of the logits draws which token of whom."""

from wire.options import Options
from worker.executor.batch import Row, Sampling, rows_of


def test_a_sampling_has_a_row_more_than_drafts() -> None:
    first = Sampling(1, Options(), 6, 6, list(range(6)), None, (71, 72))
    last = Sampling(3, Options(), 3, 3, list(range(3)))
    rows = rows_of([first, last])
    assert [(row.index, row.position) for row in rows] == [(0, 6), (1, 7), (2, 8), (3, 3)]
    assert rows_of([first, last], lambda it: it is last) == [Row(3, last, 0)]
