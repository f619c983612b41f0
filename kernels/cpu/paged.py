"""What attention is told of a step, and where a sequence's keys and values lie in the pool."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.cpu.intrinsics import ints_at, prefetch
from kernels.cpu.simd import bytes_of
from kernels.cpu.tasks import CACHE_LINE, inner

# Keys ahead of those that are read, which are asked for meanwhile.
_AHEAD = 64


class AttentionArguments(NamedTuple):
    step: int
    query: int
    token_stride: int  # of the query; likewise head_stride
    head_stride: int
    out: int
    out_element: int
    out_stride: int  # from a token to the next
    num_heads: int
    num_kv_heads: int
    shared: int  # query heads of a KV head
    head_dim: int
    pool: int  # where the layer begins in the first block
    element: int
    head_bytes: int  # of one KV head in a block
    block_bytes: int
    block_size: int
    window: int  # 0 for none
    scale: float
    max_rows: int
    way: int  # to multiply bfloat16: one of `kernels.cpu.ways`
    tiles: int  # the configuration of tiles
    taken: int = 0


@inner
def run_of_rows(
    a: AttentionArguments, table: int, head: int, position: int, end: int
) -> tuple[int, int]:
    """Return where a position's key lies, and how many lie in a row; `head` counts values too.

    Those a little later are asked for: blocks lie anywhere, so no processor foresees the next.
    """
    row_bytes = a.head_dim * bytes_of(a.element)
    start: Any = a.pool + head * a.head_bytes
    blocks = ints_at(table)
    index, offset = position // a.block_size, position % a.block_size
    length = min(a.block_size - offset, end - position)
    if position + _AHEAD < end:
        later = position + _AHEAD
        at = start + np.int64(blocks[later // a.block_size]) * a.block_bytes
        at += later % a.block_size * row_bytes
        for line in range(0, length * row_bytes, CACHE_LINE):
            prefetch(at + line)
    start += np.int64(blocks[index]) * a.block_bytes + offset * row_bytes
    return start, length
