"""Uploads bring what the host had made, however late the device copies it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.cuda.pinned import Download, put, upload
from tests.kernels.shim.copies import LateCopies

# More than one step makes, and one behind it.
SEEDS = range(9)
KINDS = [np.int32, np.int64]
DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def tables(seed: int, dtype: Any = np.int32) -> list[Any]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 99, shape, dtype) for shape in ((3,), (2, 5), (0, 4), (4, 2))]


def test_tables_of_any_shape_arrive_with_one_copy() -> None:
    with LateCopies() as copies:
        got: list[torch.Tensor] = []
        for seed in SEEDS:
            mine = tables(seed, KINDS[seed % 2])
            got += upload(mine, torch.device("cuda"))
            for table in mine:
                table[...] = 77  # the host goes on
        copies.finish()
    assert copies.num_copies == copies.num_pinned == len(SEEDS)
    want = [table for seed in SEEDS for table in tables(seed, KINDS[seed % 2])]
    for tensor, table in zip(got, want, strict=True):
        assert tensor.dtype == DTYPES[table.dtype] and tensor.tolist() == table.tolist()


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


def test_a_download_waits_for_its_copy_and_for_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = LateCopies()
    monkeypatch.setattr(torch.cuda, "Event", copies.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    row, drawn_next = torch.zeros(3, dtype=torch.int32), torch.full((3,), 9, dtype=torch.int32)
    with copies:
        row.copy_(torch.tensor([5, 6, 7], dtype=torch.int32))  # a step draws
        download = Download(row)
        row.copy_(drawn_next)
        assert copies.num_copies == 1, "the host does not wait"
        assert download.read() == row.tolist() == [5, 6, 7]
