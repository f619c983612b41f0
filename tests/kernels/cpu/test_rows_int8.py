"""Rows become planes and a scale as NumPy makes them, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.program import Program
from kernels.cpu.rows_int8 import LARGEST, room_for_planes, to_planes
from tests.kernels.cpu.int8 import planes_of


def made(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = room_for_planes(len(x), x.shape[1] + 100)
    Program([to_planes(x, out)]).run()
    half = out.shape[1] // 2
    high, low = (out[:, at:][:, : x.shape[1]].int() for at in (0, half))
    return high, low, out[:, -4:].contiguous().view(torch.float32).flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 16), (1, 64), (7, 48), (70, 576)])
def test_planes_are_those_of_numpy(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * torch.logspace(-30, 30, shape[0])[:, None]).to(dtype)
    for got, want in zip(made(x), planes_of(x), strict=True):
        assert torch.equal(got, want)


def test_ties_go_to_the_even_number() -> None:
    x = torch.zeros(1, 16)
    x[0, :5] = torch.tensor([LARGEST, 0.5, 1.5, -2.5, 63.5])
    high, low, _ = made(x)
    assert (128 * high + low)[0, :5].tolist() == [LARGEST, 0, 2, -2, 64]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_has_no_scale_and_others_keep_theirs(value: float) -> None:
    x = torch.randn(3, 32)
    want = made(x)[2]
    x[1, 7] = value
    scales = made(x)[2]
    assert scales.isnan().tolist() == [False, True, False]
    assert torch.equal(scales[::2], want[::2])
