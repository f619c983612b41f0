"""The operators on a CPU with vectors: attention reads the pool where it lies, nothing is gathered.

What this does not do (head_dim no multiple of 16, other dtypes) the reference does; so do `pack_kv`
and `unpack_kv`, which are copies.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

from kernels import attention, reference
from kernels.contract import PagedBatch
from kernels.reference import pack_kv, unpack_kv
from kernels.scalars import bits_of, fetch_add, ints_at
from kernels.simd import PANEL
from kernels.team import compiled, run

__all__ = ["append_kv", "pack_kv", "paged_attention", "unpack_kv"]

# Fewer multiplications, or tokens to copy, are done before another thread would have woken up.
_ALONE = 1 << 17
_ALONE_TOKENS = 64
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def append_kv(pool: torch.Tensor, layer: int, key_value: torch.Tensor, batch: PagedBatch) -> None:
    """See `kernels.append_kv`."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    row_bytes = head_dim * pool.itemsize
    if row_bytes % 4 or key_value.stride()[2:] != (head_dim, 1):
        reference.append_kv(pool, layer, key_value, batch)
        return
    slots = batch.slots.contiguous()
    words = [
        len(slots),
        slots.data_ptr(),
        key_value.data_ptr(),
        key_value.stride(0) * pool.itemsize,
        key_value.stride(1) * pool.itemsize,
        pool.data_ptr() + layer * 2 * num_kv_heads * block_size * row_bytes,
        num_layers * 2 * num_kv_heads * block_size * row_bytes,
        num_kv_heads,
        block_size,
        row_bytes // 4,
    ]
    run(append_task(), words, int(len(slots) < _ALONE_TOKENS))


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """See `kernels.paged_attention`."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    if head_dim % PANEL or pool.dtype not in _ELEMENTS:
        return reference.paged_attention(query, pool, layer, batch, scale, window)
    num_tokens, num_heads, _ = query.shape
    if num_tokens == 0:
        return torch.empty_like(query)
    shared = num_heads // num_kv_heads
    units = batch.scratch.get(("units", shared))
    if units is None:
        units = batch.scratch["units", shared] = attention.units_of(batch, shared)
        batch.scratch["work"] = int(units[:, 2] @ (units[:, 2] + units[:, 3]))
    heads = query if query.dtype is torch.float32 and query.stride(2) == 1 else query.float()
    out = torch.empty(num_tokens, num_heads, head_dim)
    tables = batch.block_tables
    words = [
        _ELEMENTS[pool.dtype],
        len(units) * num_kv_heads,
        units.ctypes.data,
        heads.data_ptr(),
        heads.stride(0) * 4,
        heads.stride(1) * 4,
        out.data_ptr(),
        num_heads,
        num_kv_heads,
        head_dim,
        pool[0, layer].data_ptr(),
        num_layers,
        block_size,
        tables.data_ptr(),
        tables.stride(0),
        window or 0,
        bits_of(scale * math.log2(math.e)),
        max(attention.MAX_ROWS, shared),
    ]
    run(attention.task(), words, int(batch.scratch["work"] * num_heads * head_dim < _ALONE))
    return out if query.dtype is torch.float32 else out.to(query.dtype)


@cache
def append_task() -> Any:
    """Return the compiled loop of `append_kv`."""
    return compiled(_append)


def _append(words):  # type: ignore[no-untyped-def]
    """The task: words as in `append_kv`; values are copied as they are, four bytes at a time."""
    slots, num_heads, block_size, size = ints_at(words[3]), words[9], words[10], words[11]
    while True:
        first = fetch_add(words[0], _ALONE_TOKENS)
        if first >= words[2]:
            return
        for token in range(first, min(first + _ALONE_TOKENS, words[2])):
            slot = np.int64(slots[token])
            block = words[7] + slot // block_size * words[8]
            for row in range(2 * num_heads):
                at = words[4] + token * words[5] + row // num_heads * words[6]
                source = ints_at(at + row % num_heads * size * 4)
                target = ints_at(block + (row * block_size + slot % block_size) * size * 4)
                for i in range(size):
                    target[i] = source[i]
