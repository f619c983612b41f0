"""A matrix knows which of its rows a checkpoint fills."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from worker.model.weights import Linear

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
