"""The loops of attention over a paged pool, compiled; `kernels.cpu.backend` calls them.

Threads take units (`kernels.cpu.units`), each with a KV head: the query heads that share it are its
rows, so its keys are read once.  A unit walks its context 64 keys at a time with a running maximum:
scores, 2^x (the scale holds log2 e), then sums of values (`kernels.cpu.tiles`).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

from kernels.cpu.intrinsics import bits_of, exp2, fetch_add, float_of_bits, floats_at, ints_at, read
from kernels.cpu.linear import ELEMENTS
from kernels.cpu.program import Operation
from kernels.cpu.rowwise import largest
from kernels.cpu.threads import compiled, inner
from kernels.cpu.tiles import SCORES, TILE, gather, score
from kernels.cpu.units import COLUMNS, COUNT, MAX_ROWS, TABLES, UNIT_WORDS, UNITS, Units


def attend(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    units: Units,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None,
) -> Operation:
    """Make out = the attention of query over one layer of the pool.

    Args:
        query: [T, Hq, D] float32, D a multiple of 16 and contiguous.
        pool: [N, L, 2, Hkv, B, D], of a dtype of `kernels.cpu.linear.ELEMENTS`.
        out: [T, Hq, D] float32, contiguous.
    """
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    num_heads = query.shape[1]
    words = (
        ELEMENTS[pool.dtype],
        units.words.ctypes.data,
        query.data_ptr(),
        query.stride(0) * 4,
        query.stride(1) * 4,
        out.data_ptr(),
        num_heads,
        num_kv_heads,
        head_dim,
        pool[0, layer].data_ptr(),
        num_layers,
        block_size,
        window or 0,
        bits_of(scale * math.log2(math.e)),
        max(MAX_ROWS, num_heads // num_kv_heads),
    )
    return Operation(task(), words, (query, pool, units, out))


@cache
def task() -> Any:
    """Return the compiled loop."""
    return compiled(_attend)


def _attend(words, _thread):  # type: ignore[no-untyped-def]
    """The task: words as in `attend`."""
    num_kv_heads, head_dim, block_size, window = words[9], words[10], words[13], words[14]
    num_units = read(words[3] + COUNT * 8) * num_kv_heads
    units = ints_at(read(words[3] + UNITS * 8))
    tables, columns = read(words[3] + TABLES * 8), read(words[3] + COLUMNS * 8)
    rows, max_rows = 0, words[16]
    memory = np.empty(max_rows * (2 * head_dim + SCORES + 2) + TILE * head_dim, np.float32)
    x = memory.ctypes.data
    y = x + max_rows * head_dim * 4
    scores = y + max_rows * head_dim * 4
    state = scores + max_rows * SCORES * 4
    panels = state + max_rows * 2 * 4
    while True:
        taken = fetch_add(words[0], 1)
        if taken >= num_units:
            return
        unit, head = taken // num_kv_heads * UNIT_WORDS, taken % num_kv_heads
        table = tables + np.int64(units[unit]) * columns * 4
        token = np.int64(units[unit + 1])
        num_queries, position = np.int64(units[unit + 2]), np.int64(units[unit + 3])
        rows = _begin(words, token, num_queries, head, x, y, state)
        first: Any = 0
        if window:
            first = max(0, position - window + 1) // block_size * block_size
        end = position + num_queries
        while first < end:
            num_keys = min(TILE, end - first)
            score(words, table, head, first, num_keys, end, rows, x, scores, panels)
            _weigh(words, first, num_keys, rows, position, scores, state, y)
            gather(words, table, head, first, num_keys, end, rows, scores, y)
            first += num_keys
        _finish(words, token, rows, head, y, state)


@inner
def _begin(words, token, num_queries, head, x, y, state):  # type: ignore[no-untyped-def]
    """Copy a unit's queries, scaled, to x; clear its sums y and its state (maximum, total)."""
    query, token_stride, head_stride = words[4], words[5], words[6]
    shared, head_dim, scale = words[8] // words[9], words[10], float_of_bits(words[15])
    rows = num_queries * shared
    maximum_total = floats_at(state)
    for row in range(rows):
        at = (token + row // shared) * token_stride + (head * shared + row % shared) * head_stride
        source = floats_at(query + at)
        scaled, sums = floats_at(x + row * head_dim * 4), floats_at(y + row * head_dim * 4)
        for d in range(head_dim):
            scaled[d] = source[d] * scale
        for d in range(head_dim):
            sums[d] = np.float32(0)
        maximum_total[2 * row] = np.float32(-np.inf)
        maximum_total[2 * row + 1] = np.float32(0)
    return rows


@inner
def _weigh(words, first, num_keys, rows, position, scores, state, y):  # type: ignore[no-untyped-def]
    """Turn scores into weights relative to each row's new maximum; keys not seen weigh nothing."""
    shared, head_dim, window = words[8] // words[9], words[10], words[14]
    maximum_total = floats_at(state)
    for row in range(rows):
        last = position + row // shared
        stop = min(num_keys, last + 1 - first)
        start = max(0, last - window + 1 - first) if window else 0
        weights = floats_at(scores + row * SCORES * 4)
        before = maximum_total[2 * row]
        maximum = largest(weights, start, stop, before)
        total = np.float32(0)
        for j in range(start, stop):
            weight = exp2(weights[j] - maximum)
            weights[j] = weight
            total += weight
        for j in range(0, min(start, num_keys)):
            weights[j] = np.float32(0)
        for j in range(max(stop, 0), num_keys):
            weights[j] = np.float32(0)
        if maximum > before:
            kept = exp2(before - maximum)
            maximum_total[2 * row] = maximum
            maximum_total[2 * row + 1] *= kept
            sums = floats_at(y + row * head_dim * 4)
            for d in range(head_dim):
                sums[d] *= kept
        maximum_total[2 * row + 1] += total


@inner
def _finish(words, token, rows, head, y, state):  # type: ignore[no-untyped-def]
    """Write sums over totals to the output."""
    num_heads, head_dim = words[8], words[10]
    shared = num_heads // words[9]
    for row in range(rows):
        at = (token + row // shared) * num_heads + head * shared + row % shared
        target, sums = floats_at(words[7] + at * head_dim * 4), floats_at(y + row * head_dim * 4)
        share = np.float32(1) / floats_at(state)[2 * row + 1]
        for d in range(head_dim):
            target[d] = sums[d] * share
