"""The operators on a CPU with vectors: attention reads the pool where it lies, nothing is gathered.

What this does not do (head_dim no multiple of 16, other dtypes) the reference does, and all the
rest: a model whose widths allow it runs as a program of `kernels.cpu.program` instead.
"""

from __future__ import annotations

import torch

from kernels import reference
from kernels.contract import PagedBatch
from kernels.cpu.attention import attend
from kernels.cpu.linear import ELEMENTS
from kernels.cpu.program import Program
from kernels.cpu.simd import PANEL
from kernels.cpu.units import Units
from kernels.reference import (
    add_rms_norm,
    append_kv,
    check_pool,
    pack_kv,
    rms_norm,
    silu_gate,
    unpack_kv,
)

__all__ = [
    "add_rms_norm",
    "append_kv",
    "check_pool",
    "pack_kv",
    "paged_attention",
    "rms_norm",
    "silu_gate",
    "unpack_kv",
]


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """See `kernels.paged_attention`."""
    num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
    if head_dim % PANEL or pool.dtype not in ELEMENTS:
        return reference.paged_attention(query, pool, layer, batch, scale, window)
    out = torch.empty(query.shape)
    if len(query):
        shared, heads = query.shape[1] // num_kv_heads, query.float()
        if heads.stride(2) != 1:
            heads = heads.contiguous()
        units = batch.scratch.get(shared)
        if units is None:
            units = batch.scratch[shared] = Units(shared)
            units.set(batch)
            Program([units.cut()]).run()
        Program([attend(heads, pool, layer, units, out, scale=scale, window=window)]).run()
    return out.to(query.dtype)
