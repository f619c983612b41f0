"""A matrix knows which of its rows a checkpoint fills."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from worker.model.weights import Linear, widen

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
def test_projections_of_a_checkpoint_are_rows_of_one_matrix(bias: bool) -> None:
    matrix = Linear({"a": 20, "b": 12}, 24, bias=bias, dtype=torch.float32, device=CPU)
    parts = matrix.named("x.")
    for tensor in parts.values():
        tensor.copy_(torch.randn(tensor.shape))
    x = torch.randn(7, 24)
    want = [linear(x, parts[f"x.{name}.weight"], parts.get(f"x.{name}.bias")) for name in "ab"]
    torch.testing.assert_close(matrix(x), torch.cat(want, dim=1))


def test_all_experts_may_have_one_matrix_turned_over() -> None:
    stack = Linear({"a": 20}, 24, bias=True, dtype=torch.float32, device=CPU, num_experts=3)
    named = stack.named_as_one("x")
    assert {name: tuple(it.shape) for name, it in named.items()} == {
        "x": (3, 24, 20),
        "x_bias": (3, 20),
    }
    named["x"].copy_(torch.randn(3, 24, 20))
    assert torch.equal(stack.weight, named["x"].transpose(1, 2))
    assert stack.bias is named["x_bias"]


@pytest.mark.parametrize("bias", [False, True])
def test_each_expert_has_a_matrix_of_its_own(bias: bool) -> None:
    stack = Linear(
        {"a": 20, "b": 12}, 24, bias=bias, dtype=torch.bfloat16, device=CPU, num_experts=3
    )
    named = stack.named("x.")
    kinds = ("weight", "bias") if bias else ("weight",)
    assert set(named) == {
        f"x.{i}.{part}.{kind}" for i in range(3) for part in "ab" for kind in kinds
    }
    for tensor in named.values():
        tensor.copy_(torch.randn(tensor.shape))
    parts = [torch.cat((named[f"x.{i}.a.weight"], named[f"x.{i}.b.weight"])) for i in range(3)]
    assert torch.equal(stack.weight, torch.stack(parts))
    widen(stack)
    assert torch.equal(stack.weight, torch.stack(parts).float())
    assert (stack.bias is not None) is bias
    assert stack.bias is None or stack.bias.shape == (3, 32)
