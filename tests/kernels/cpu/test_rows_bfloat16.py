"""Rows in registers: the weights of keys, and gated pairs, against the formula."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numba import njit
from torch.nn.functional import gelu, silu

from kernels import GELU_TANH, SILU, Activation
from kernels.cpu import rows_bfloat16
from kernels.cpu.rows_bfloat16 import LONG_TILE, ROWS
from tests.kernels.rowwise_scenes import CLAMPED, clamped


@njit
def weigh(*arguments):  # type: ignore[no-untyped-def]
    return rows_bfloat16.weigh_rows(*arguments)


BOUNDS = [(0, LONG_TILE), (0, 1), (5, 40), (1, LONG_TILE), (LONG_TILE - 1, LONG_TILE), (0, 0)]
BASES = [(-1e30, 0.0), (-5.0, 2.0), (40.0, 3.0), (-60.0, 4.0)]


@pytest.mark.parametrize("bounds", [BOUNDS[i : i + ROWS] for i in range(3)] + [None])
def test_rows_of_weights(bounds: list[tuple[int, int]] | None) -> None:
    for shift in range(len(BASES)):  # every row with every base
        scores = torch.randn(ROWS, LONG_TILE) * 5
        at = torch.tensor(bounds or [(0, LONG_TILE)] * ROWS, dtype=torch.int32)
        for row, (start, stop) in enumerate(at.tolist()):
            scores[row, stop:] = torch.nan
            scores[row, :start] = torch.nan
        before = torch.tensor([BASES[(row + shift) % len(BASES)] for row in range(ROWS)])
        weights, kept = torch.empty(ROWS, LONG_TILE, dtype=torch.bfloat16), torch.empty(ROWS)
        state = before.clone()
        kept.fill_(1)
        is_changed = weigh(
            scores.data_ptr(),
            weights.data_ptr(),
            at.data_ptr() if bounds else 0,
            state.data_ptr(),
            kept.data_ptr(),
        )
        assert is_changed == bool((kept != 1).any())
        for row, (start, stop) in enumerate(at.tolist()):
            base, total = before[row].tolist()
            highest = max([-math.inf, *scores[row, start:stop].tolist()])
            raised = math.ceil(highest) if highest > base + 32 else base
            want = torch.zeros(LONG_TILE)
            want[start:stop] = torch.exp2(scores[row, start:stop] - raised)
            factor = 2.0 ** max(base - raised, -200.0)
            assert state[row, 0] == np.float32(raised) and kept[row] == np.float32(factor)
            assert state[row, 1].item() == pytest.approx(
                total * factor + want.sum().item(), rel=2e-4
            )
            torch.testing.assert_close(weights[row].float(), want, rtol=2**-7.9, atol=2e-38)


def test_a_row_weighs_the_same_among_others() -> None:
    scores = torch.randn(ROWS, LONG_TILE) * 5
    weights, kept = torch.empty(2, ROWS, LONG_TILE, dtype=torch.bfloat16), torch.empty(ROWS)
    states = torch.tensor([(3.0, 2.0)] * 2 * ROWS).view(2, ROWS, 2)
    # Once all in one go; once each in another's place, within bounds that leave nothing out.
    whole = torch.tensor([(-9, LONG_TILE + 9)] * ROWS, dtype=torch.int32)
    turned = scores.flip(0).contiguous()
    for index, (source, bounds) in enumerate(((scores, 0), (turned, whole.data_ptr()))):
        at = weights[index].data_ptr(), bounds, states[index].data_ptr(), kept.data_ptr()
        weigh(source.data_ptr(), *at)
    assert torch.equal(weights[0], weights[1].flip(0))
    assert torch.equal(states[0], states[1].flip(0))


@pytest.mark.parametrize(
    ("activation", "want"),
    [
        (SILU, lambda gate, up: silu(gate) * up),
        (GELU_TANH, lambda gate, up: gelu(gate, approximate="tanh") * up),
        (CLAMPED, clamped),
    ],
)
def test_gated_pairs(activation: Activation, want: Callable[..., torch.Tensor]) -> None:
    @njit
    def call(*arguments):  # type: ignore[no-untyped-def]
        rows_bfloat16.gate_pair(*arguments)

    far = torch.tensor([-1e4, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e4] * 2)
    for gate in (far, *torch.randn(50, 16) * 5):
        up, out = torch.randn(16) * 4, torch.empty(16, dtype=torch.bfloat16)
        addresses = gate.data_ptr(), up.data_ptr(), out.data_ptr()
        call(*addresses, *(np.float32(number) for number in activation))
        gated = want(gate.double(), up.double()).float()
        # 1 + tanh is no better than this.
        least = 1e-30 if activation is SILU else 1e-14
        torch.testing.assert_close(out.float(), gated, rtol=2**-7.9, atol=least)
