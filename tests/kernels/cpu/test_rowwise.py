"""One pass gives what torch's several give."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, rms_norm, silu

from kernels import GELU_TANH, SILU, Activation
from kernels.cpu import rowwise
from kernels.cpu.linear import PackedWeight
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.linear_int8 import Int8Weight
from kernels.cpu.program import Program
from kernels.cpu.rows_int8 import to_planes
from tests.kernels.rowwise_scenes import CLAMPED, clamped

ROWS = [0, 1, 3, 8, 70]


def normed(x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((len(x) if rows is None else len(rows), x.shape[1]), torch.nan)
    Program([rowwise.norm(x, weight, 1e-6, out, rows)]).run()
    return out


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    out = torch.full((len(gate_up), gate_up.shape[1] // 2), torch.nan)
    Program([rowwise.gate(gate_up, out, activation)]).run()
    return out


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [1, 7, 64, 576])
def test_norm(rows: int, size: int) -> None:
    x, weight = torch.randn(rows, size) * 3, torch.randn(size)
    want = rms_norm(x, (size,), weight, 1e-6)
    torch.testing.assert_close(normed(x, weight), want, rtol=1e-5, atol=1e-6)


def test_norm_of_some_rows() -> None:
    x, weight = torch.randn(9, 33), torch.randn(33)
    rows = torch.tensor([8, 0, 3, 3], dtype=torch.int32)
    assert torch.equal(normed(x, weight, rows), normed(x, weight)[rows.long()])


def test_no_row_is_written_but_those_that_are_asked_for() -> None:
    x, weight, out = torch.randn(80, 2 * 64), torch.randn(2 * 64), torch.full((80, 128), 7.0)
    halves, token_ids = torch.full((80, 64), 7.0), torch.arange(80, dtype=torch.int32)
    Program(
        [
            rowwise.gate(x[:70], halves[:70], SILU),
            rowwise.norm(x[:70], weight, 1e-6, out[:70]),
            rowwise.embed(token_ids[:70], x, out[:70]),
        ]
    ).run()
    assert (out[70:] == 7).all() and (halves[70:] == 7).all()


def test_what_products_read_in_16_bits_is_rounded_once() -> None:
    x, weight, out = torch.randn(9, 64) * 3, torch.randn(64), PairedWeight.inputs(9, 64)
    Program([rowwise.norm(x, weight, 1e-6, out)]).run()
    assert torch.equal(out, normed(x, weight).bfloat16())


def test_what_products_read_as_planes_is_made_of_the_same_numbers() -> None:
    x, weight, out = torch.randn(9, 64) * 3, torch.randn(64), Int8Weight.inputs(9, 64)
    want = torch.zeros_like(out.zero_())
    Program([rowwise.norm(x, weight, 1e-6, out), to_planes(normed(x, weight), want)]).run()
    assert torch.equal(out, want)


@pytest.mark.parametrize("rows", ROWS)
def test_gate(rows: int) -> None:
    gate_up = torch.randn(rows, 2 * 100) * 5
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(gated(gate_up, SILU), silu(gate) * up, rtol=1e-5, atol=1e-6)
    want = (gelu(gate.double(), approximate="tanh") * up).float()
    torch.testing.assert_close(gated(gate_up, GELU_TANH), want, rtol=1e-5, atol=1e-6)
    want = clamped(gate * 2, up * 2)
    torch.testing.assert_close(gated(gate_up * 2, CLAMPED), want, rtol=1e-5, atol=1e-6)


def test_a_limit_leaves_nan_what_it_is() -> None:
    gate_up = torch.ones(3, 2 * 20)
    gate_up[0, 0] = gate_up[-1, -1] = torch.nan
    got = gated(gate_up, CLAMPED)
    assert got[0, 0].isnan() and got[-1, -1].isnan() and got.isnan().sum() == 2


@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_gate_of_values_whose_exponential_overflows(activation: Activation) -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e4]])
    got = gated(torch.cat((gate, torch.ones_like(gate)), dim=1), activation)
    torch.testing.assert_close(got, gate.clamp(min=0), atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [None, PackedWeight, PairedWeight])
def test_embeddings_are_looked_up(
    dtype: torch.dtype, packed: type[PackedWeight] | type[PairedWeight] | None
) -> None:
    weight = torch.randn(50, 12).to(torch.bfloat16 if packed is PairedWeight else dtype)
    token_ids = torch.tensor([0, 49, 16, 15, 16], dtype=torch.int32)
    out = torch.full((5, 12), torch.nan)
    table = weight if packed is None else packed(weight)
    for factor in (1.0, 3.5):
        Program([rowwise.embed(token_ids, table, out, factor)]).run()
        assert torch.equal(out, weight[token_ids.long()].float() * factor)
    elsewhere = torch.tensor([3, -1], dtype=torch.int32)
    Program([rowwise.embed(elsewhere, table, out[:2])]).run()
    assert torch.equal(out[:2], torch.stack([weight[3].float(), torch.zeros(12)]))


def test_embeddings_of_int8_are_multiples_of_their_scale() -> None:
    weight, token_ids = torch.randn(50, 100), torch.tensor([0, 49, 16, 15, -1], dtype=torch.int32)
    packed, out = Int8Weight(weight), torch.full((5, 100), torch.nan)
    scales = weight.abs().amax(1, keepdim=True) / 127
    want = ((weight / scales).round() * scales)[token_ids[:4].long()]
    for factor in (1.0, 4.0):
        Program([rowwise.embed(token_ids, packed, out, factor)]).run()
        assert torch.equal(out[:4], want * factor)
        assert not out[4].any()
