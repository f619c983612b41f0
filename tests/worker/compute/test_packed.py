"""Packed feed-forwards add to rows what those of the checkpoint make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu.linear import PackedWeight
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.linear_int8 import Int8Weight
from kernels.cpu.program import Program
from kernels.cpu.rows_int8 import to_planes
from kernels.cpu.rowwise import norm
from scripts.models.make_model import make_model
from worker.compute.packed import (
    ExpertBuffers,
    Packed,
    PackedExperts,
    PackedMLP,
    gated_rows,
    in_one_call,
)
from worker.model.loader import load_weights
from worker.model.weights import ExpertMLP, GatedMLP, Weights

KINDS: list[Packed] = [PackedWeight, PairedWeight, Int8Weight]
# How far off what is added is: bfloat16 and int8 round.
LIMITS = {PackedWeight: 1e-5, PairedWeight: 0.02, Int8Weight: 0.03}
EPS = 1e-6


def weights_of(path: Path, family: str = "qwen3_moe", **shape: Any) -> Weights:
    """Return a model whose second layer is made of experts, and the first one by itself dense."""
    return load_weights(make_model(path, family=family, **shape), None, torch.device("cpu"))


def rows_of(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    rows = packed.inputs(len(x), x.shape[1])
    if packed is Int8Weight:
        Program([to_planes(x, rows)]).run()
    else:
        rows.copy_(x)
    return rows


def assert_near(got: torch.Tensor, want: torch.Tensor, packed: Packed) -> None:
    assert (got - want).norm() < LIMITS[packed] * want.norm()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("packed", KINDS)
def test_experts_add_what_they_make_of_their_tokens(
    packed: Packed, family: str, tmp_path: Path
) -> None:
    mlp = weights_of(tmp_path, family).layers[1].mlp
    assert isinstance(mlp, ExpertMLP)
    experts, before = PackedExperts.of(mlp, packed), torch.randn(50, 64)
    ones = torch.ones(64)
    normed = torch.nn.functional.rms_norm(before, (64,), ones, EPS)

    def added(rows: torch.Tensor) -> torch.Tensor:
        """Return what a room for more tokens than these has them become."""
        hidden, room = before[: len(rows)].clone(), ExpertBuffers(experts.config, 64, 60, packed)
        exact = room.exact[: len(rows)]
        exact_norm = None if packed is PackedWeight else norm(hidden, ones, EPS, exact)
        in_one_call(experts.added(hidden, rows, exact_norm, room, mlp.activation))()
        return hidden

    rows = rows_of(packed, normed)
    together = added(rows)
    assert_near(together - before, mlp(normed), packed)
    for count in (0, 1, 7):
        assert torch.equal(added(rows[:count]), together[:count])


@pytest.mark.parametrize("packed", KINDS)
def test_one_feed_forward_for_all_tokens(packed: Packed, tmp_path: Path) -> None:
    mlp = weights_of(tmp_path).layers[0].mlp
    assert isinstance(mlp, GatedMLP)
    x, scale = torch.randn(20, 64), torch.rand(64) + 0.5
    gated, planes = gated_rows(20, 128, packed), packed.inputs(20, 128)
    wide, added = torch.empty(20, 256), torch.empty(20, 64)
    for post_norm in (None, scale):
        whole, y = PackedMLP.of(mlp, packed, post_norm), torch.ones(20, 64)
        program = [
            *whole.gate_up.gated(rows_of(packed, x), wide, gated, mlp.activation),
            *whole.down.added(gated, y, planes, added, EPS),
        ]
        in_one_call(program)()
        made = mlp(x)
        if post_norm is not None:
            made = torch.nn.functional.rms_norm(made, (64,), post_norm, EPS)
        assert_near(y - 1, made, packed)


def test_calls_come_where_they_stand_among_operations() -> None:
    x, seen = torch.full((1, 4), 2.0), list[list[float]]()
    outs = [torch.zeros(1, 4) for _ in range(3)]
    norms = [norm(x, torch.full((4,), float(it)), EPS, out) for it, out in enumerate(outs, 1)]

    def look() -> None:
        seen.append([round(float(out[0, 0])) for out in outs])

    run = in_one_call([*norms[:2], look, look, norms[2], look])
    run()
    assert seen == [[1, 2, 0], [1, 2, 0], [1, 2, 3]]
