"""Heads are normalized and rotated as torch does it, and KV is rounded into its slots likewise."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm

from kernels import reference
from kernels.contract import PagedBatch
from kernels.cpu import rotary
from kernels.cpu.program import Program

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 8, 12


def turned(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    pairs = torch.complex(*heads.contiguous().chunk(2, dim=-1))
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((pairs.real, pairs.imag), -1)


@pytest.mark.parametrize("rows", [0, 1, 3, 70])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_normed", [False, True])
def test_heads_end_up_where_they_belong(
    rows: int, head_dim: int, dtype: torch.dtype, is_normed: bool
) -> None:
    num_rotated = NUM_HEADS + NUM_KV_HEADS
    heads = torch.randn(rows, num_rotated + NUM_KV_HEADS, head_dim) * 3
    angles = torch.randn(rows, head_dim // 2)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:rows].int()
    weight = torch.randn(num_rotated, head_dim)
    pool = torch.randn(NUM_BLOCKS, 3, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim).to(dtype)
    expected, before = pool.clone(), heads.clone()
    rotation = torch.stack((angles.cos(), angles.sin()), dim=1)
    norm = weight if is_normed else None
    Program([rotary.rotate_and_append(heads, rotation, pool, 1, slots, norm, 1e-6)]).run()

    rotated = before[:, :num_rotated]
    if is_normed:
        rotated = rms_norm(rotated, (head_dim,), None, 1e-6) * weight
    want = torch.cat((turned(rotated, angles), before[:, num_rotated:]), dim=1)
    torch.testing.assert_close(heads, want, rtol=1e-5, atol=1e-5)
    nothing = torch.zeros(0, dtype=torch.int32)
    batch = PagedBatch(slots, nothing, nothing, nothing)
    still = torch.tensor([1.0, 0.0])[None, :, None].expand_as(rotation)
    reference.rotate_and_append(heads, still, expected, 1, batch)
    # What is stored is what torch rounds to, to the bit; other layers and slots are not touched.
    assert torch.equal(pool, expected)
