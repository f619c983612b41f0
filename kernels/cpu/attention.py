"""Compiled attention over a paged pool on the CPU; keys and values are read in place.

A thread takes one work item (`kernels.cpu.work_items`) and one KV head at a time.  The rows of an
item are its queries in each head that shares the KV head, so its keys are read once.  An item's
context is processed in tiles of 64 keys with a running maximum: scores, weights 2^x (the scale
includes log2 e), then sums of weighted values.

Few rows are multiplied with keys as they are stored; for many rows (prompts) it pays to transpose
keys into panels, so that scores are matrix products too.  16-bit keys and values are widened in
registers, so every sum is float32.  If the pool and the output are both bfloat16, products are in
bfloat16 instead (`kernels.cpu.attention_bfloat16`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.contract import Softmax
from kernels.cpu import amx
from kernels.cpu.attention_bfloat16 import ROWS_TOGETHER, attend_pairs
from kernels.cpu.bfloat16_methods import Way, known_way
from kernels.cpu.intrinsics import bfloat16_at, exp2, float16_at, floats_at
from kernels.cpu.linear import ELEMENTS
from kernels.cpu.paged import AttentionArguments, cap_scores, run_of_rows, sink_of
from kernels.cpu.program import Operation
from kernels.cpu.rowwise import largest
from kernels.cpu.simd import FLOAT16, FLOAT32, PANEL, bytes_of, key_dots, narrow, panel_product
from kernels.cpu.tasks import allocate, free, inner
from kernels.cpu.threads import take
from kernels.cpu.work_items import ITEM_BYTES, MAX_ROWS, Item, WorkItems, item_at, step_at

# Keys of a tile, and floats between rows of scores: up to three beyond a tile are written too.
TILE = 64
SCORES = TILE + 4
# From this many rows on, transposing keys into panels is cheaper than a sum across lanes for each
# score.
_MANY = 12
# Rows multiplied at a time with one panel; rows multiplied with four keys or two panels of values.
_GROUP, _FEW, _KEYS = 6, 3, 4

_product = panel_product(_GROUP)
_product_of_two = panel_product(_FEW, 2)
_dots = key_dots(_FEW)


class _Memory(NamedTuple):
    """Addresses of a work item's temporary arrays."""

    x: int  # [rows, D] queries
    y: int  # [rows, D] sums of weighted values
    panels: int  # the keys of a tile, as float32
    scores: int  # [rows, SCORES]
    state: int  # [rows, 2] maximum and total


class _Keys(NamedTuple):
    """The context of a work item and a KV head; the current tile begins at `first`."""

    table: int
    head: int
    first: int
    end: int


def attend(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    items: WorkItems,
    out: torch.Tensor,
    softmax: Softmax,
    way: Way | None = None,
) -> Operation:
    """Return the operation out = attention of query over one layer of the pool.

    Args:
        query: [T, Hq, D] float32, D a multiple of 16 and contiguous.
        pool: [N, L, 2, Hkv, B, D], of a dtype of `kernels.cpu.linear.ELEMENTS`.
        out: [T, Hq, D] float32 or bfloat16, with any stride between tokens.
        way: One of `known_ways`; None for the fastest.
    """
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    scale, window, cap, sinks = softmax
    num_heads = query.shape[1]
    head_bytes = block_size * head_dim * pool.itemsize
    is_paired = pool.dtype is out.dtype is torch.bfloat16 and head_dim % amx.STEP == 0
    tiles = amx.configuration(amx.TILE_ROWS, amx.TILE_ROWS)
    arguments = AttentionArguments(
        step=items.address,
        query=query.data_ptr(),
        token_stride=query.stride(0) * 4,
        head_stride=query.stride(1) * 4,
        out=out.data_ptr(),
        out_element=ELEMENTS[out.dtype],
        out_stride=out.stride(0) * out.itemsize,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        shared=num_heads // num_kv_heads,
        head_dim=head_dim,
        pool=pool[0, layer].data_ptr(),
        element=ELEMENTS[pool.dtype],
        head_bytes=head_bytes,
        block_bytes=num_layers * 2 * num_kv_heads * head_bytes,
        block_size=block_size,
        window=window or 0,
        sinks=0 if sinks is None else sinks.data_ptr(),
        scale=scale * math.log2(math.e),
        cap=(cap or 0.0) * math.log2(math.e),
        max_rows=-(-max(MAX_ROWS, num_heads // num_kv_heads) // ROWS_TOGETHER) * ROWS_TOGETHER,
        way=known_way(way),
        tiles=tiles.ctypes.data,
    )
    return Operation(
        attend_pairs if is_paired else _attend, arguments, (query, pool, items, out, sinks, tiles)
    )


def _attend(a: AttentionArguments, _thread: int) -> None:
    step, head_dim = step_at(a.step), a.head_dim
    num_taken = step.num_items * a.num_kv_heads
    # Floats of a row: its query, its sums, its scores, its maximum and total; then a tile's keys.
    size = a.max_rows * (2 * head_dim + SCORES + 2) + head_dim * TILE
    x = allocate(size * 4)
    y = x + a.max_rows * head_dim * 4
    panels = y + a.max_rows * head_dim * 4
    scores = panels + TILE * head_dim * 4
    memory = _Memory(x, y, panels, scores, scores + a.max_rows * SCORES * 4)
    while True:
        taken = take(a, 1)
        if taken >= num_taken:
            break
        item = item_at(step.items + taken // a.num_kv_heads * ITEM_BYTES)
        head = taken % a.num_kv_heads
        table = step.tables + item.sequence * step.num_columns * 4
        rows = _begin(a, item, head, memory)
        first: Any = 0
        if a.window:
            first = max(0, item.position - a.window + 1) // a.block_size * a.block_size
        end = item.position + item.num_queries
        while first < end:
            keys, num_keys = _Keys(table, head, first, end), min(TILE, end - first)
            _score(a, keys, num_keys, rows, memory)
            _weigh(a, first, num_keys, rows, item.position, memory)
            _gather(a, keys, num_keys, rows, memory)
            first += num_keys
        _finish(a, item.token, rows, head, memory)
    free(x)


@inner
def _begin(a: AttentionArguments, item: Item, head: int, memory: _Memory) -> int:
    """Copy an item's scaled queries, initialize its sums and state; return its number of rows."""
    shared, head_dim = a.shared, a.head_dim
    rows = item.num_queries * shared
    maximum_total = floats_at(memory.state)
    for row in range(rows):
        token, shared_head = item.token + row // shared, head * shared + row % shared
        source = floats_at(a.query + token * a.token_stride + shared_head * a.head_stride)
        offset = row * head_dim * 4
        scaled, sums = floats_at(memory.x + offset), floats_at(memory.y + offset)
        for d in range(head_dim):
            scaled[d] = source[d] * a.scale
        for d in range(head_dim):
            sums[d] = np.float32(0)
        maximum_total[2 * row] = sink_of(a, shared_head) if a.sinks else np.float32(-np.inf)
        maximum_total[2 * row + 1] = np.float32(1 if a.sinks else 0)
    return rows


@inner
def _score(a: AttentionArguments, tile: _Keys, num_keys: int, rows: int, memory: _Memory) -> None:
    """Compute the scores of a tile's keys."""
    element, head_dim = a.element, a.head_dim
    stride, row_bytes = head_dim * 4, head_dim * bytes_of(element)
    key = 0
    while key < num_keys:
        keys, length = run_of_rows(a, tile.table, tile.head, tile.first + key, tile.end)
        length = min(length, num_keys - key)
        if rows < _MANY:
            for j in range(0, length, _KEYS):
                at, to = keys + j * row_bytes, memory.scores + (key + j) * 4
                _score_few(element, at, row_bytes, length - j, rows, memory.x, stride, to)
        else:
            for j in range(key, key + length):
                column = memory.panels + j // PANEL * PANEL * stride + j % PANEL * 4
                _transpose(element, keys + (j - key) * row_bytes, column, head_dim)
        key += length
    if rows >= _MANY:
        _score_many(memory.panels, num_keys, rows, memory.x, stride, memory.scores)


@inner
def _score_few(
    element: int,
    keys: int,
    row_bytes: int,
    num_keys: int,
    rows: int,
    x: int,
    stride: int,
    scores: int,
) -> None:
    """Compute the scores of up to four adjacent keys."""
    # The last key stands in for keys beyond it, whose scores are not used.
    w1 = keys + min(1, num_keys - 1) * row_bytes
    w2 = keys + min(2, num_keys - 1) * row_bytes
    w3 = keys + min(3, num_keys - 1) * row_bytes
    for row in range(0, rows, _FEW):
        at, to = x + row * stride, scores + row * SCORES * 4
        _dots(element, keys, w1, w2, w3, at, stride, to, SCORES * 4, stride // 4, rows - row)


@inner
def _transpose(element: int, key: int, column: int, head_dim: int) -> None:
    """Write a key into one column of a panel [head_dim, PANEL]."""
    target = floats_at(column)
    if element == FLOAT32:
        source = floats_at(key)
        for d in range(head_dim):
            target[d * PANEL] = source[d]
    elif element == FLOAT16:
        for d in range(head_dim):
            target[d * PANEL] = float16_at(key + 2 * d)
    else:
        for d in range(head_dim):
            target[d * PANEL] = bfloat16_at(key + 2 * d)


@inner
def _score_many(panels: int, num_keys: int, rows: int, x: int, stride: int, scores: int) -> None:
    """Multiply rows by the panels of a tile's keys."""
    for key in range(0, num_keys, PANEL):
        panel = panels + key * stride
        for row in range(0, rows, _GROUP):
            at, to, left = x + row * stride, scores + (row * SCORES + key) * 4, rows - row
            _product(0, panel, PANEL * 4, at, stride, to, SCORES * 4, stride // 4, left, 0, 0, 0, 0)


@inner
def _weigh(
    a: AttentionArguments, first: int, num_keys: int, rows: int, position: int, memory: _Memory
) -> None:
    """Turn scores into weights relative to each row's new maximum; masked keys get weight 0."""
    shared, head_dim, window = a.shared, a.head_dim, a.window
    maximum_total = floats_at(memory.state)
    for row in range(rows):
        last = position + row // shared
        stop = min(num_keys, last + 1 - first)
        start = max(0, last - window + 1 - first) if window else 0
        weights = floats_at(memory.scores + row * SCORES * 4)
        if a.cap:
            cap_scores(weights, start, stop, a.cap)
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
            sums = floats_at(memory.y + row * head_dim * 4)
            for d in range(head_dim):
                sums[d] *= kept
        maximum_total[2 * row + 1] += total


@inner
def _gather(a: AttentionArguments, tile: _Keys, num_keys: int, rows: int, memory: _Memory) -> None:
    """Add each row's weighted values to its sums."""
    row_bytes, values_head = a.head_dim * bytes_of(a.element), a.num_kv_heads + tile.head
    key = 0
    while key < num_keys:
        values, length = run_of_rows(a, tile.table, values_head, tile.first + key, tile.end)
        count = min(length, num_keys - key)
        scores = memory.scores + key * 4
        _add(a.element, values, row_bytes, a.head_dim, count, rows, scores, memory.y)
        key += count


@inner
def _add(
    element: int,
    values: int,
    row_bytes: int,
    head_dim: int,
    count: int,
    rows: int,
    scores: int,
    y: int,
) -> None:
    """Add the weighted values of `count` adjacent keys to the rows' sums, as a matrix product.

    It is the weights [rows, count] at `scores` times the values [count, head_dim], added to the
    sums [rows, head_dim] at `y`.
    """
    stride, panel_bytes = head_dim * 4, row_bytes // head_dim * PANEL
    is_few = rows < _MANY and head_dim % (2 * PANEL) == 0
    group, step = (_FEW, 2) if is_few else (_GROUP, 1)
    for panel in range(0, head_dim // PANEL, step):
        v, column = values + panel * panel_bytes, y + panel * PANEL * 4
        for row in range(0, rows, group):
            x, to = scores + row * SCORES * 4, column + row * stride
            sizes = (count, rows - row, 1, panel_bytes, 0, 0)
            operands = (element, v, row_bytes, x, SCORES * 4, to, stride, *sizes)
            if is_few:
                _product_of_two(*operands)
            else:
                _product(*operands)


@inner
def _finish(a: AttentionArguments, token: int, rows: int, head: int, memory: _Memory) -> None:
    """Divide sums by softmax denominators and write the output; x is scratch for 16-bit outputs."""
    head_dim, shared, element, x = a.head_dim, a.shared, a.out_element, memory.x
    for row in range(rows):
        first = (head * shared + row % shared) * head_dim
        at = a.out + (token + row // shared) * a.out_stride + first * bytes_of(element)
        y, share = memory.y, np.float32(1) / floats_at(memory.state)[2 * row + 1]
        if element == FLOAT32:
            _scale(y + row * head_dim * 4, share, at, head_dim)
        else:
            _scale(y + row * head_dim * 4, share, x, head_dim)
            narrow(element, x, at, head_dim)


@inner
def _scale(source: int, factor: Any, target: int, size: int) -> None:
    values, scaled = floats_at(source), floats_at(target)
    for i in range(size):
        scaled[i] = values[i] * factor
