"""Rows in registers: the weights of keys, and gated pairs, against the formula."""

from __future__ import annotations

import math

import pytest
import torch
from numba import njit
from torch.nn.functional import silu

from kernels.cpu import rows_bfloat16
from kernels.cpu.rows_bfloat16 import LONG_TILE


@njit
def weigh(*arguments):  # type: ignore[no-untyped-def]
    return rows_bfloat16.weigh_row(*arguments)


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, LONG_TILE), (0, 1), (5, 40), (1, LONG_TILE), (LONG_TILE - 1, LONG_TILE), (0, 0)],
)
def test_a_row_of_weights(start: int, stop: int) -> None:
    scores, weights = torch.randn(LONG_TILE) * 5, torch.empty(LONG_TILE, dtype=torch.bfloat16)
    scores[stop:] = torch.nan
    scores[:start] = torch.nan
    for maximum, total in ((-math.inf, 0.0), (1.5, 2.0), (40.0, 3.0)):
        state = torch.tensor([maximum, total])
        kept = weigh(scores.data_ptr(), weights.data_ptr(), start, stop, state.data_ptr())
        seen = scores[start:stop]
        highest = max([maximum, *seen.tolist()])
        want = torch.zeros(LONG_TILE)
        if highest > -math.inf:
            want[start:stop] = torch.exp2(seen - highest)
        assert state[0] == highest
        factor = 0.0 if maximum == -math.inf else 2.0 ** (maximum - highest)
        assert kept == pytest.approx(factor, rel=1e-5)
        assert state[1].item() == pytest.approx(total * factor + want.sum().item(), rel=1e-4)
        torch.testing.assert_close(weights.float(), want, rtol=2**-8, atol=1e-37)


def test_gated_pairs() -> None:
    @njit
    def call(*arguments):  # type: ignore[no-untyped-def]
        rows_bfloat16.gate_pair(*arguments)

    far = torch.tensor([-1e4, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e4] * 2)
    for gate in (far, *torch.randn(50, 16) * 5):
        up, out = torch.randn(16), torch.empty(16, dtype=torch.bfloat16)
        call(gate.data_ptr(), up.data_ptr(), out.data_ptr())
        torch.testing.assert_close(out.float(), silu(gate) * up, rtol=2**-8, atol=1e-30)
