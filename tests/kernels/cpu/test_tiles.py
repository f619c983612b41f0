"""Tiles whose keys end anywhere in a block, a tile or a group of four, for few and many rows."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import backend as cpu
from tests.kernels.scenes import check, scene


@pytest.mark.parametrize("block_size", [1, 3, 8, 24, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_of_any_size(block_size: int, dtype: torch.dtype) -> None:
    lens = [(1, 1), (2, 1), (63, 1), (64, 1), (65, 2), (129, 1), (67, 30)]
    it = scene(lens, block_size=block_size, dtype=dtype, backend=cpu)
    for window in (None, 5, 65):
        check(it, window, cpu)


@pytest.mark.parametrize("shared", [1, 2, 3, 4, 5, 7, 11, 12, 13])
@pytest.mark.parametrize("head_dim", [16, 32, 48, 128])
def test_rows_in_groups_of_every_size(shared: int, head_dim: int) -> None:
    lens = [(70, 1), (131, 1)]
    it = scene(lens, num_heads=2 * shared, num_kv_heads=2, head_dim=head_dim, backend=cpu)
    check(it, None, cpu)
