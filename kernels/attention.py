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
    fetch,
    fetch_add,
    float_of_bits,
    floats_at,
    half_at,
    ints_at,
    read,
)
from kernels.simd import PANEL, key_dots, panel_product
from kernels.team import comparing, compiled, inner
from kernels.units import MAX_ROWS, UNIT_WORDS, Units

TILE = 64
# Four scores are written at a time, up to three of them beyond the last.
_SCORES = TILE + 4
_LINE = 64
# From so many rows on, turning keys into panels is cheaper than a sum across lanes for each score.
_MIN_PANEL_ROWS = 12
_GROUP = 6
# Rows that meet four keys, or two panels of values, in registers.
_FEW, _KEYS = 3, 4

_float32_product = panel_product("float32", _GROUP)
_bfloat16_product = panel_product("bfloat16", _GROUP)
_float16_product = panel_product("float16", _GROUP)
# Columns of values two panels at a time where rows are few, as in `kernels.linear`.
_float32_pair = panel_product("float32", _FEW, 2)
_bfloat16_pair = panel_product("bfloat16", _FEW, 2)
_float16_pair = panel_product("float16", _FEW, 2)
_float32_dots = key_dots("float32", _FEW)
_bfloat16_dots = key_dots("bfloat16", _FEW)
_float16_dots = key_dots("float16", _FEW)


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
    memory = np.empty(max_rows * (2 * head_dim + _SCORES + 2) + TILE * head_dim, np.float32)
    x = memory.ctypes.data
    y = x + max_rows * head_dim * 4
    scores = y + max_rows * head_dim * 4
    state = scores + max_rows * _SCORES * 4
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
        end = position + num_queries
        while first < end:
            num_keys = min(TILE, end - first)
            _score(words, table, head, first, num_keys, end, rows, x, scores, panel)
            _weigh(words, first, num_keys, rows, position, scores, state, y)
            _gather(words, table, head, first, num_keys, end, rows, scores, y)
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
def _run_of(words, table, kind, head, position, end):  # type: ignore[no-untyped-def]
    """Return where the key (kind 0) or value (1) of one position lies, and how many lie in a row.

    Those of a tile later are asked for: blocks lie anywhere, so no processor foresees the next.
    """
    num_kv_heads, head_dim, block_size = words[9], words[10], words[13]
    row_bytes = head_dim * (4 if words[2] == 0 else 2)
    blocks = ints_at(table)
    index, offset = position // block_size, position % block_size
    at = words[11] + kind * num_kv_heads * block_size * row_bytes
    at += head * block_size * row_bytes
    size = words[12] * 2 * num_kv_heads * block_size * row_bytes
    length = min(block_size - offset, end - position)
    if position + TILE < end:
        later = at + np.int64(blocks[(position + TILE) // block_size]) * size
        later += (position + TILE) % block_size * row_bytes
        for line in range(0, length * row_bytes, _LINE):
            fetch(later + line)
    return at + np.int64(blocks[index]) * size + offset * row_bytes, length


@inner
def _score(words, table, head, first, num_keys, end, rows, x, scores, panel):  # type: ignore[no-untyped-def]
    """Write the scores [rows, TILE] of the keys from `first` on."""
    element, head_dim = words[2], words[10]
    stride, row_bytes = head_dim * 4, head_dim * (4 if element == 0 else 2)
    key = 0
    while key < num_keys:
        keys, length = _run_of(words, table, 0, head, first + key, end)
        length = min(length, num_keys - key)
        if rows < _MIN_PANEL_ROWS:
            for j in range(0, length, _KEYS):
                _score_few(
                    element,
                    keys + j * row_bytes,
                    row_bytes,
                    length - j,
                    rows,
                    x,
                    stride,
                    scores + (key + j) * 4,
                )
        else:
            for j in range(length):
                _turn(
                    element,
                    keys + j * row_bytes,
                    panel + (key + j) // PANEL * PANEL * stride + (key + j) % PANEL * 4,
                    head_dim,
                )
        key += length
    if rows >= _MIN_PANEL_ROWS:
        for key in range(0, num_keys, PANEL):
            for row in range(0, rows, _GROUP):
                at, to = x + row * stride, scores + (row * _SCORES + key) * 4
                _float32_product(
                    panel + key * stride,
                    PANEL * 4,
                    at,
                    stride,
                    to,
                    _SCORES * 4,
                    head_dim,
                    rows - row,
                    0,
                    0,
                )


@inner
def _score_few(element, keys, row_bytes, num_keys, rows, x, stride, scores):  # type: ignore[no-untyped-def]
    """Write the scores of up to four keys that lie in a row."""
    # Keys beyond the last are the last once more; nobody reads their scores.
    w1 = keys + min(1, num_keys - 1) * row_bytes
    w2 = keys + min(2, num_keys - 1) * row_bytes
    w3 = keys + min(3, num_keys - 1) * row_bytes
    for row in range(0, rows, _FEW):
        at, to, left = x + row * stride, scores + row * _SCORES * 4, rows - row
        if element == 1:
            _bfloat16_dots(keys, w1, w2, w3, at, stride, to, _SCORES * 4, stride // 4, left)
        elif element == 0:
            _float32_dots(keys, w1, w2, w3, at, stride, to, _SCORES * 4, stride // 4, left)
        else:
            _float16_dots(keys, w1, w2, w3, at, stride, to, _SCORES * 4, stride // 4, left)


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
        weights = floats_at(scores + row * _SCORES * 4)
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
def _gather(words, table, head, first, num_keys, end, rows, scores, y):  # type: ignore[no-untyped-def]
    """Add each row's weighted values to its sums, block by block."""
    element, head_dim = words[2], words[10]
    v_stride, y_stride = head_dim * (4 if element == 0 else 2), head_dim * 4
    key = 0
    while key < num_keys:
        values, length = _run_of(words, table, 1, head, first + key, end)
        count, at = min(length, num_keys - key), scores + key * 4
        if rows < _MIN_PANEL_ROWS and head_dim % (2 * PANEL) == 0:
            _add_pairs(element, values, v_stride, at, y, y_stride, count, rows)
        else:
            _add_panels(element, values, v_stride, at, y, y_stride, count, rows)
        key += count


@inner
def _add_pairs(element, block, v_stride, scores, y, y_stride, count, rows):  # type: ignore[no-untyped-def]
    width = v_stride // (y_stride // 4) * PANEL
    for row in range(0, rows, _FEW):
        left, at = rows - row, scores + row * _SCORES * 4
        for pair in range(y_stride // (2 * PANEL * 4)):
            v, to = block + pair * 2 * width, y + row * y_stride + pair * 2 * PANEL * 4
            if element == 1:
                _bfloat16_pair(v, v_stride, at, _SCORES * 4, to, y_stride, count, left, 1, width)
            elif element == 0:
                _float32_pair(v, v_stride, at, _SCORES * 4, to, y_stride, count, left, 1, width)
            else:
                _float16_pair(v, v_stride, at, _SCORES * 4, to, y_stride, count, left, 1, width)


@inner
def _add_panels(element, block, v_stride, scores, y, y_stride, count, rows):  # type: ignore[no-untyped-def]
    width = v_stride // (y_stride // 4) * PANEL
    for panel in range(y_stride // (PANEL * 4)):
        v, column = block + panel * width, y + panel * PANEL * 4
        for row in range(0, rows, _GROUP):
            left, at, to = rows - row, scores + row * _SCORES * 4, column + row * y_stride
            if element == 1:
                _bfloat16_product(v, v_stride, at, _SCORES * 4, to, y_stride, count, left, 1, 0)
            elif element == 0:
                _float32_product(v, v_stride, at, _SCORES * 4, to, y_stride, count, left, 1, 0)
            else:
                _float16_product(v, v_stride, at, _SCORES * 4, to, y_stride, count, left, 1, 0)


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
