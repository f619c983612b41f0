"""Rows go to the experts that torch chooses, and no token's numbers depend on the others."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.cpu.experts import Routes
from kernels.cpu.linear import PackedWeight
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.program import Program

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


@pytest.mark.parametrize("kind", [PackedWeight, PairedWeight])
def test_rows_are_copied_to_each_of_their_places(
    kind: type[PackedWeight] | type[PairedWeight],
) -> None:
    x, routes = kind.inputs(20, WIDTH), routes_of(torch.randn(20, NUM_EXPERTS), 4)
    x.copy_(torch.randn(20, WIDTH))
    out = kind.inputs(80, WIDTH)
    Program([routes.spread(x, out)]).run()
    assert torch.equal(out, x[routes.groups.tokens.long()])
