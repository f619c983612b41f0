"""The loops of attention over a paged pool, compiled; `kernels.cpu` calls them.

Threads take units (`kernels.units`), each with a KV head: the query heads that share it are its
rows, so its keys are read once.  A unit walks its context 64 keys at a time with a running maximum:
scores, 2^x (the scale holds log2 e), then sums of values.  Few rows meet keys as they lie; many
rows (prompts) are worth turning keys into panels, and scores are matrix products as well.  16-bit
KV is widened in registers: every sum is float32.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

from kernels.linear import ELEMENTS
from kernels.program import Operation
from kernels.scalars import (
    bits_of,
    brain_at,
    exp2,
    fetch_add,
    float_of_bits,
    floats_at,
    half_at,
    ints_at,
    read,
)
from kernels.simd import PANEL, panel_product, row_dots
from kernels.team import comparing, compiled, inner
from kernels.units import MAX_ROWS, UNIT_WORDS, Units

TILE = 64
# From so many rows on, turning keys into panels is cheaper than a sum across lanes for each score.
_MIN_PANEL_ROWS = 12
_GROUP = 6

_float32_product = panel_product("float32", _GROUP)
_bfloat16_product = panel_product("bfloat16", _GROUP)
_float16_product = panel_product("float16", _GROUP)
_float32_dots = row_dots("float32", _GROUP)
_bfloat16_dots = row_dots("bfloat16", _GROUP)
_float16_dots = row_dots("float16", _GROUP)


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
        pool: [N, L, 2, Hkv, B, D], of a dtype of `kernels.linear.ELEMENTS`.
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


def _attend(words):  # type: ignore[no-untyped-def]
    """The task: words as in `attend`."""
    num_kv_heads, head_dim, block_size, window = words[9], words[10], words[13], words[14]
    num_units, units = read(words[3]) * num_kv_heads, ints_at(read(words[3] + 8))
    tables, columns = read(words[3] + 16), read(words[3] + 24)
    rows, max_rows = 0, words[16]
    memory = np.empty(max_rows * (2 * head_dim + TILE + 2) + PANEL * head_dim, np.float32)
    x = memory.ctypes.data
    y = x + max_rows * head_dim * 4
    scores = y + max_rows * head_dim * 4
    state = scores + max_rows * TILE * 4
    panel = state + max_rows * 2 * 4
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
        while first < position + num_queries:
            num_keys = min(TILE, position + num_queries - first)
            _score(words, table, head, first, num_keys, rows, x, scores, panel)
            _weigh(words, first, num_keys, rows, position, scores, state, y)
            _gather(words, table, head, first, num_keys, rows, scores, y)
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
def _address(words, table, kind, head, position):  # type: ignore[no-untyped-def]
    """Return where the key (kind 0) or value (1) of one position lies."""
    num_kv_heads, head_dim, block_size = words[9], words[10], words[13]
    size = 4 if words[2] == 0 else 2
    block = np.int64(ints_at(table)[position // block_size])
    row = (block * words[12] * 2 + kind) * num_kv_heads + head
    return words[11] + (row * block_size + position % block_size) * head_dim * size


@inner
def _score(words, table, head, first, num_keys, rows, x, scores, panel):  # type: ignore[no-untyped-def]
    """Write the scores [rows, TILE] of the keys from `first` on."""
    element, head_dim = words[2], words[10]
    for key in range(0, num_keys, PANEL):
        for j in range(key, min(key + PANEL, num_keys)):
            k = _address(words, table, 0, head, first + j)
            if rows >= _MIN_PANEL_ROWS:
                _turn(element, k, panel + (j - key) * 4, head_dim)
                continue
            for row in range(0, rows, _GROUP):
                at, to = x + row * head_dim * 4, scores + (row * TILE + j) * 4
                if element == 1:
                    _bfloat16_dots(k, at, head_dim * 4, to, TILE * 4, head_dim, rows - row)
                elif element == 0:
                    _float32_dots(k, at, head_dim * 4, to, TILE * 4, head_dim, rows - row)
                else:
                    _float16_dots(k, at, head_dim * 4, to, TILE * 4, head_dim, rows - row)
        if rows >= _MIN_PANEL_ROWS:
            stride = head_dim * 4
            for row in range(0, rows, _GROUP):
                at, to = x + row * stride, scores + (row * TILE + key) * 4
                _float32_product(
                    panel, PANEL * 4, at, stride, to, TILE * 4, head_dim, rows - row, 0, 0
                )


@inner
def _turn(element, k, column, head_dim):  # type: ignore[no-untyped-def]
    """Write a key into one column of a panel [head_dim, PANEL]."""
    target = floats_at(column)
    if element == 0:
        key = floats_at(k)
        for d in range(head_dim):
            target[d * PANEL] = key[d]
    else:
        for d in range(head_dim):
            target[d * PANEL] = half_at(k + 2 * d) if element == 2 else brain_at(k + 2 * d)


@inner
def _weigh(words, first, num_keys, rows, position, scores, state, y):  # type: ignore[no-untyped-def]
    """Turn scores into weights relative to each row's new maximum; keys not seen weigh nothing."""
    shared, head_dim, window = words[8] // words[9], words[10], words[14]
    maximum_total = floats_at(state)
    for row in range(rows):
        last = position + row // shared
        stop = min(num_keys, last + 1 - first)
        start = max(0, last - window + 1 - first) if window else 0
        weights = floats_at(scores + row * TILE * 4)
        before = maximum_total[2 * row]
        maximum = _largest(weights, start, stop, before)
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


@comparing
def _largest(numbers, start, stop, largest):  # type: ignore[no-untyped-def]
    for j in range(start, stop):
        largest = numbers[j] if numbers[j] > largest else largest
    return largest


@inner
def _gather(words, table, head, first, num_keys, rows, scores, y):  # type: ignore[no-untyped-def]
    """Add each row's weighted values to its sums, block by block."""
    element, head_dim, block_size = words[2], words[10], words[13]
    size = 4 if element == 0 else 2
    v_stride, y_stride = head_dim * size, head_dim * 4
    key = 0
    while key < num_keys:
        count = min(block_size - (first + key) % block_size, num_keys - key)
        block = _address(words, table, 1, head, first + key)
        for column in range(0, head_dim, PANEL):
            v = block + column * size
            for row in range(0, rows, _GROUP):
                left, at = rows - row, scores + (row * TILE + key) * 4
                to = y + row * y_stride + column * 4
                if element == 1:
                    _bfloat16_product(v, v_stride, at, TILE * 4, to, y_stride, count, left, 1, 0)
                elif element == 0:
                    _float32_product(v, v_stride, at, TILE * 4, to, y_stride, count, left, 1, 0)
                else:
                    _float16_product(v, v_stride, at, TILE * 4, to, y_stride, count, left, 1, 0)
        key += count


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
