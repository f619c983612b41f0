"""Rows go to the experts that torch chooses, and no token's numbers depend on the others."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from kernels import SILU, reference
from kernels.cpu.experts import Routes
from kernels.cpu.linear import PackedWeight
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.program import Program
from kernels.cpu.rowwise import gate as gate_rows

NUM_EXPERTS, WIDTH, SIZE = 12, 64, 48


def routes_of(logits: torch.Tensor, top_k: int, *, is_normalized: bool = True) -> Routes:
    routes = Routes(len(logits), NUM_EXPERTS, top_k)
    Program(routes.choose(logits, is_normalized=is_normalized)).run()
    return routes


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_tokens_go_where_torch_sends_them(rows: int, top_k: int, is_normalized: bool) -> None:
    logits = torch.randn(rows, NUM_EXPERTS + 4) * 9
    routes = routes_of(logits, top_k, is_normalized=is_normalized)
    experts, shares = reference.route(logits[:, :NUM_EXPERTS], top_k, is_normalized)
    assert torch.equal(routes.experts, experts.int())
    torch.testing.assert_close(routes.shares, shares, rtol=1e-5, atol=1e-7)
    # Rows are numbered by expert, then by token.
    order = experts.flatten().argsort(stable=True)
    assert torch.equal(routes.groups.tokens.long(), order // top_k)
    assert torch.equal(routes.groups.shares, routes.shares.flatten()[order])


def test_of_equal_experts_the_first_are_chosen() -> None:
    assert routes_of(torch.zeros(2, NUM_EXPERTS), 3).experts.tolist() == [[0, 1, 2]] * 2


def test_a_row_of_nan_goes_somewhere_and_spoils_no_other() -> None:
    logits = torch.randn(3, NUM_EXPERTS)
    want = routes_of(logits, 2).shares.clone()
    logits[1] = torch.nan
    routes = routes_of(logits, 2)
    assert 0 <= routes.experts.min() and routes.experts.max() < NUM_EXPERTS
    assert torch.equal(routes.shares[::2], want[::2])


def mixed(
    x: torch.Tensor, logits: torch.Tensor, gate_up: PackedWeight, down: PackedWeight
) -> torch.Tensor:
    """Return what three experts a token make of each row of x."""
    routes, rows = Routes(len(x), NUM_EXPERTS, 3), 3 * len(x)
    spread, wide = torch.full((rows, WIDTH), torch.nan), torch.full((rows, 2 * SIZE), torch.nan)
    gated, out = torch.empty(rows, SIZE), torch.zeros(x.shape)
    Program(
        [
            *routes.choose(logits, is_normalized=True),
            routes.spread(x, spread),
            gate_up.times(spread, wide, groups=routes.groups),
            gate_rows(wide, gated, SILU),
            down.times(gated, out, groups=routes.groups, is_by_token=True),
        ]
    ).run()
    return out


def test_what_experts_make_of_a_token_is_theirs_and_its_own() -> None:
    x, logits = torch.randn(90, WIDTH), torch.randn(90, NUM_EXPERTS)
    gate_up, down = (
        torch.randn(NUM_EXPERTS, 2 * SIZE, WIDTH) / 8,
        torch.randn(NUM_EXPERTS, WIDTH, SIZE) / 7,
    )
    packed = PackedWeight(gate_up), PackedWeight(down)
    together = mixed(x, logits, *packed)
    experts, shares = reference.route(logits, 3, is_normalized=True)
    for token in range(0, 90, 7):
        want = torch.zeros(WIDTH)
        for expert, share in zip(experts[token], shares[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            want += share * (down[expert] @ (silu(gate) * up))
        torch.testing.assert_close(together[token], want, rtol=1e-4, atol=1e-5)
        some = slice(token, token + 5)
        assert torch.equal(mixed(x[some], logits[some], *packed), together[some])


@pytest.mark.parametrize("kind", [PackedWeight, PairedWeight])
def test_rows_are_copied_to_each_of_their_places(
    kind: type[PackedWeight] | type[PairedWeight],
) -> None:
    x, routes = kind.inputs(20, WIDTH), routes_of(torch.randn(20, NUM_EXPERTS), 4)
    x.copy_(torch.randn(20, WIDTH))
    out = kind.inputs(80, WIDTH)
    Program([routes.spread(x, out)]).run()
    assert torch.equal(out, x[routes.groups.tokens.long()])
