"""What the host refuses; `test_backends` has what the kernels compute."""

from __future__ import annotations

import pytest
import torch

from kernels import KernelError, launch_rows

ROWS, WEIGHT = torch.zeros(2, 8), torch.zeros(8)


def test_rows_that_do_not_fit_each_other() -> None:
    with pytest.raises(KernelError, match="not all contiguous"):
        launch_rows.normalize(ROWS, ROWS.half(), WEIGHT, 1e-5, ROWS.clone())
    with pytest.raises(KernelError, match="not all contiguous"):
        launch_rows.normalize(ROWS.T, None, WEIGHT[:2], 1e-5, ROWS.clone())


def test_dtypes_that_have_no_kernel() -> None:
    with pytest.raises(KernelError, match=r"rows are torch\.float64"):
        launch_rows.gate(ROWS.double(), ROWS[:, :4].double())


def test_no_rows_are_no_launch() -> None:
    none = ROWS[:0]
    assert launch_rows.normalize(none, none, WEIGHT, 1e-5, none) == []
    assert launch_rows.gate(none, none[:, :4]) == []
