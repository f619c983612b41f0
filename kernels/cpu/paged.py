"""The arguments of attention tasks, and the addresses of a sequence's keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.cpu.intrinsics import exp2, floats_at, ints_at, prefetch
from kernels.cpu.simd import bytes_of
from kernels.cpu.tasks import CACHE_LINE, inner

_LOG2_E = np.float32(1.4426950408889634)
# How many keys ahead to prefetch.
_AHEAD = 64


class AttentionArguments(NamedTuple):
    step: int
    query: int
    token_stride: int  # of the query; so is head_stride
    head_stride: int
    out: int
    out_element: int
    out_stride: int  # from a token to the next
    num_heads: int
    num_kv_heads: int
    shared: int  # query heads that share a KV head
    head_dim: int
    pool: int  # address of the layer in the first block
    element: int
    head_bytes: int  # size of one KV head in a block
    block_bytes: int
    block_size: int
    window: int  # 0 for none
    sinks: int  # address of a float32 for each query head; 0 for none
    scale: float  # times log2 e, as the cap is: scores are exponents of 2
    cap: float  # 0 for none
    max_rows: int
    way: int  # a method of `kernels.cpu.bfloat16_methods`
    tiles: int  # address of the tile configuration
    taken: int = 0


@inner
def run_of_rows(
    a: AttentionArguments, table: int, head: int, position: int, end: int
) -> tuple[int, int]:
    """Return the address of a key's row, and the number of consecutive rows from it on.

    `head` + num_kv_heads addresses values.  Rows a little later are prefetched: blocks may be
    anywhere, so no processor can predict the next one.
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


@inner
def sink_of(a: AttentionArguments, query_head: int) -> Any:
    """Return the score of a head's sink, as an exponent of 2."""
    return floats_at(a.sinks)[query_head] * _LOG2_E


@inner
def cap_scores(scores: Any, start: int, stop: int, cap: Any) -> None:
    """Replace scores[start:stop] by cap * tanh(score / cap)."""
    # tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|), which cannot overflow.
    slope, one = np.float32(-2) * _LOG2_E / cap, np.float32(1)
    for i in range(start, stop):
        small = exp2(abs(scores[i]) * slope)
        size = cap * (one - small) / (one + small)
        scores[i] = size if scores[i] >= 0 else -size
