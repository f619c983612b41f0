"""Uploads bring what the host had made, however late the device copies it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.cuda.pinned import Download, put, upload
from tests.kernels.shim.copies import LateCopies

CPU = torch.device("cpu")


def tables(seed: int, dtype: Any = np.int32) -> list[Any]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 99, shape, dtype) for shape in ((3,), (2, 5), (0, 4), (4, 2))]


def test_tables_of_any_shape_arrive_with_one_copy() -> None:
    first, second = tables(1), tables(2, np.int64)
    with LateCopies() as copies:
        got = [*upload(first, CPU), *upload(second, CPU)]
        for table in (*first, *second):
            table[...] = 77  # the host goes on
        copies.finish()
    assert copies.num_copies == 2
    assert [it.dtype for it in got] == [torch.int32] * 4 + [torch.int64] * 4
    for tensor, table in zip(got, [*tables(1), *tables(2)], strict=True):
        assert tensor.tolist() == table.tolist()


def test_tables_are_put_where_they_belong_step_after_step() -> None:
    rows, wide = torch.zeros(3, dtype=torch.int32), torch.zeros(2, 9, dtype=torch.int32)
    with LateCopies() as copies:
        for seed in (1, 2):
            row, table, *_ = tables(seed)
            put([(rows, row), (wide[:, :5], table)])
            row[:], table[:] = 77, 77
        assert not rows.any() and not wide.any(), "nothing is there yet"
        copies.finish()
    row, table, *_ = tables(2)
    assert rows.tolist() == row.tolist() and wide[:, :5].tolist() == table.tolist()
    assert not wide[:, 5:].any()


def test_a_download_is_read_when_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = LateCopies()
    waited: list[str] = []

    class Event:
        def record(self, stream: str) -> None:
            waited.append(stream)

        def synchronize(self) -> None:
            waited.append("synchronize")
            copies.finish()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "record")
    row = torch.tensor([5, 6, 7], dtype=torch.int32)
    with copies:
        download = Download(row)
        assert download.read() == [5, 6, 7]
    assert waited == ["record", "synchronize"]
