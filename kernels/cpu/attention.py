"""Attention over a paged pool on the CPU, compiled: keys and values are read where they lie.

Threads take a work item (`kernels.cpu.work_items`) and a KV head at a time.  The query heads that
share the head are the item's rows, so its keys are read once.  An item walks its context in tiles
of 64 keys with a running maximum: scores, 2^x (the scale holds log2 e), then sums of values.

Few rows meet keys as they lie; many rows (prompts) are worth turning keys into panels, and scores
are matrix products as well.  16-bit keys and values are widened in registers: every sum is float32.
Where outputs are bfloat16 as well as the pool, products are in bfloat16 instead, for any rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.cpu import amx
from kernels.cpu import attention_bfloat16 as paired
from kernels.cpu.attention_bfloat16 import ROWS_TOGETHER
from kernels.cpu.intrinsics import bfloat16_at, exp2, float16_at, floats_at, ints_at, prefetch
from kernels.cpu.linear import ELEMENTS
from kernels.cpu.program import Operation
from kernels.cpu.rows_bfloat16 import LONG_TILE, weigh_row
from kernels.cpu.rowwise import largest
from kernels.cpu.simd import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    PANEL,
    bytes_of,
    key_dots,
    narrow,
    panel_product,
)
from kernels.cpu.tasks import CACHE_LINE, inner
from kernels.cpu.threads import take
from kernels.cpu.work_items import ITEM_BYTES, MAX_ROWS, Item, WorkItems, item_at, step_at

# Keys of a tile in float32, and floats from a row of scores to the next: up to three beyond a tile
# are written too.
TILE = 64
SCORES = TILE + 4
# From so many rows on, turning keys into panels is cheaper than a sum across lanes for each score.
_MANY = 12
# Rows that meet one panel in registers; rows that meet four keys, or two panels of values.
_GROUP, _FEW, _KEYS = 6, 3, 4

_product = panel_product(_GROUP)
_product_of_two = panel_product(_FEW, 2)
_dots = key_dots(_FEW)


class _Arguments(NamedTuple):
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
    is_paired: bool  # products are in bfloat16
    tiles: int  # by tiles, of this configuration; 0 for vectors
    taken: int = 0


def attend(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    items: WorkItems,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    by_tiles: bool = True,
) -> Operation:
    """Make out = the attention of query over one layer of the pool.

    Args:
        query: [T, Hq, D] float32, D a multiple of 16 and contiguous.
        pool: [N, L, 2, Hkv, B, D], of a dtype of `kernels.cpu.linear.ELEMENTS`.
        out: [T, Hq, D] float32 or bfloat16; tokens as far apart as they like.
        by_tiles: False for vectors; else tiles, where the processor has them.
    """
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    num_heads = query.shape[1]
    head_bytes = block_size * head_dim * pool.itemsize
    is_paired = pool.dtype is out.dtype is torch.bfloat16 and head_dim % amx.STEP == 0
    by_tiles = by_tiles and amx.available()
    tiles = amx.configuration(amx.TILE_ROWS, amx.TILE_ROWS)
    arguments = _Arguments(
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
        scale=scale * math.log2(math.e),
        max_rows=-(-max(MAX_ROWS, num_heads // num_kv_heads) // ROWS_TOGETHER) * ROWS_TOGETHER,
        is_paired=is_paired,
        tiles=tiles.ctypes.data if is_paired and by_tiles else 0,
    )
    return Operation(_attend, arguments, (query, pool, items, out, tiles))


def _attend(a: _Arguments, _thread: int) -> None:
    step, head_dim = step_at(a.step), a.head_dim
    num_taken = step.num_items * a.num_kv_heads
    # Floats of a row: its query, sums and state, then what a tile needs (in bfloat16 scores, and
    # queries and weights in half a float); floats of the keys and values of a tile.
    of_tile = LONG_TILE + (head_dim + LONG_TILE) // 2 if a.is_paired else SCORES
    of_keys = head_dim * (LONG_TILE if a.is_paired else TILE)
    size = a.max_rows * (2 * head_dim + 2 + of_tile) + of_keys
    memory = np.empty(size + CACHE_LINE, np.float32)
    x = -(-memory.ctypes.data // CACHE_LINE) * CACHE_LINE
    y = x + a.max_rows * head_dim * 4
    panels = y + a.max_rows * head_dim * 4
    scores = panels + of_keys * 4
    state = scores + a.max_rows * of_tile * 4
    if a.tiles:
        amx.configure(a.tiles)
    while True:
        taken = take(a, 1)
        if taken >= num_taken:
            break
        item = item_at(step.items + taken // a.num_kv_heads * ITEM_BYTES)
        head = taken % a.num_kv_heads
        table = step.tables + item.sequence * step.num_columns * 4
        rows = _begin(a, item, head, x, y, state)
        first: Any = 0
        if a.window:
            first = max(0, item.position - a.window + 1) // a.block_size * a.block_size
        end = item.position + item.num_queries
        if a.is_paired:
            _walk_pairs(a, table, head, first, item, rows, x, y, scores, panels, state)
        else:
            _walk(a, table, head, first, end, rows, item.position, x, y, scores, panels, state)
        _finish(a, item.token, rows, head, x, y, state)
    if a.tiles:
        amx.release()


@inner
def _walk(
    a: _Arguments,
    table: int,
    head: int,
    first: int,
    end: int,
    rows: int,
    position: int,
    x: int,
    y: int,
    scores: int,
    panels: int,
    state: int,
) -> None:
    """Add up the values of an item's context in y, tile by tile, in float32."""
    while first < end:
        num_keys = min(TILE, end - first)
        _score(a, table, head, first, num_keys, end, rows, x, scores, panels)
        _weigh(a, first, num_keys, rows, position, scores, state, y)
        _gather(a, table, head, first, num_keys, end, rows, scores, y)
        first += num_keys


@inner
def _walk_pairs(
    a: _Arguments,
    table: int,
    head: int,
    first: int,
    item: Item,
    rows: int,
    x: int,
    y: int,
    scores: int,
    panels: int,
    state: int,
) -> None:
    """Do what `_walk` does, with products in bfloat16.

    What a row's sums are made of does not depend on the item: a tile begins at a multiple of its
    length, and keys that a row does not see, or nobody, weigh nothing.
    """
    head_dim, end = a.head_dim, item.position + item.num_queries
    weights = scores + a.max_rows * LONG_TILE * 4
    queries = weights + a.max_rows * LONG_TILE * 2
    keys, values = panels, panels + LONG_TILE * head_dim * 2
    narrow(BFLOAT16, x, queries, rows * head_dim)
    tile = first // LONG_TILE * LONG_TILE
    while tile < end:
        num_keys = min(LONG_TILE, end - tile)
        size = -(-num_keys // amx.STEP) * amx.STEP
        key = max(0, first - tile)
        # Values that nobody has written may be NaN, of which no weight makes nothing.
        paired.pair_values(0, key, 0, size, head_dim, values)
        while key < num_keys:
            at, length = _run(a, table, head, tile + key, end)
            count = min(length, num_keys - key)
            paired.turn_keys(at, count, key, head_dim, keys)
            at, length = _run(a, table, a.num_kv_heads + head, tile + key, end)
            paired.pair_values(at, count, key, size, head_dim, values)
            key += count
        paired.pair_values(0, size - num_keys, num_keys, size, head_dim, values)
        paired.multiply(
            a.tiles, rows, queries, head_dim * 2, head_dim, keys, size, scores, LONG_TILE * 4, 0
        )
        _weigh_pairs(a, tile, num_keys, rows, item.position, scores, weights, state, y)
        paired.multiply(
            a.tiles, rows, weights, LONG_TILE * 2, size, values, head_dim, y, head_dim * 4, 1
        )
        tile += LONG_TILE


@inner
def _weigh_pairs(
    a: _Arguments,
    first: int,
    num_keys: int,
    rows: int,
    position: int,
    scores: int,
    weights: int,
    state: int,
    y: int,
) -> None:
    """Turn scores into bfloat16 weights relative to each row's new maximum."""
    shared, head_dim, window = a.shared, a.head_dim, a.window
    for row in range(rows):
        last = position + row // shared
        stop = min(num_keys, last + 1 - first)
        start = max(0, last - window + 1 - first) if window else 0
        at, to = scores + row * LONG_TILE * 4, weights + row * LONG_TILE * 2
        kept = weigh_row(at, to, start, stop, state + row * 8)
        if kept != np.float32(1):
            sums = floats_at(y + row * head_dim * 4)
            for d in range(head_dim):
                sums[d] *= kept


@inner
def _begin(a: _Arguments, item: Item, head: int, x: int, y: int, state: int) -> int:
    """Copy an item's queries, scaled, to x; clear its sums y and its state (maximum, total)."""
    shared, head_dim = a.shared, a.head_dim
    rows = item.num_queries * shared
    maximum_total = floats_at(state)
    for row in range(rows):
        token, shared_head = item.token + row // shared, head * shared + row % shared
        source = floats_at(a.query + token * a.token_stride + shared_head * a.head_stride)
        scaled, sums = floats_at(x + row * head_dim * 4), floats_at(y + row * head_dim * 4)
        for d in range(head_dim):
            scaled[d] = source[d] * a.scale
        for d in range(head_dim):
            sums[d] = np.float32(0)
        maximum_total[2 * row] = np.float32(-np.inf)
        maximum_total[2 * row + 1] = np.float32(0)
    return rows


@inner
def _score(
    a: _Arguments,
    table: int,
    head: int,
    first: int,
    num_keys: int,
    end: int,
    rows: int,
    x: int,
    scores: int,
    panels: int,
) -> None:
    """Write the scores [rows, SCORES] of the keys from `first` on, of a context that ends at `end`.

    `panels` is room for the tile's keys as float32.
    """
    element, head_dim = a.element, a.head_dim
    stride, row_bytes = head_dim * 4, head_dim * bytes_of(element)
    key = 0
    while key < num_keys:
        keys, length = _run(a, table, head, first + key, end)
        length = min(length, num_keys - key)
        if rows < _MANY:
            for j in range(0, length, _KEYS):
                at, to = keys + j * row_bytes, scores + (key + j) * 4
                _score_few(element, at, row_bytes, length - j, rows, x, stride, to)
        else:
            for j in range(key, key + length):
                column = panels + j // PANEL * PANEL * stride + j % PANEL * 4
                _turn(element, keys + (j - key) * row_bytes, column, head_dim)
        key += length
    if rows >= _MANY:
        _score_many(panels, num_keys, rows, x, stride, scores)


@inner
def _run(a: _Arguments, table: int, head: int, position: int, end: int) -> tuple[int, int]:
    """Return where a position's key lies, and how many lie in a row; `head` counts values too.

    Those of a tile later are asked for: blocks lie anywhere, so no processor foresees the next.
    """
    row_bytes = a.head_dim * bytes_of(a.element)
    start: Any = a.pool + head * a.head_bytes
    blocks = ints_at(table)
    index, offset = position // a.block_size, position % a.block_size
    length = min(a.block_size - offset, end - position)
    if position + TILE < end:
        later = position + TILE
        at = start + np.int64(blocks[later // a.block_size]) * a.block_bytes
        at += later % a.block_size * row_bytes
        for line in range(0, length * row_bytes, CACHE_LINE):
            prefetch(at + line)
    start += np.int64(blocks[index]) * a.block_bytes + offset * row_bytes
    return start, length


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
    """Write the scores of up to four keys that lie in a row."""
    # Keys beyond the last are the last once more; nobody reads their scores.
    w1 = keys + min(1, num_keys - 1) * row_bytes
    w2 = keys + min(2, num_keys - 1) * row_bytes
    w3 = keys + min(3, num_keys - 1) * row_bytes
    for row in range(0, rows, _FEW):
        at, to = x + row * stride, scores + row * SCORES * 4
        _dots(element, keys, w1, w2, w3, at, stride, to, SCORES * 4, stride // 4, rows - row)


@inner
def _turn(element: int, key: int, column: int, head_dim: int) -> None:
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
    """Multiply rows with the panels of a tile's keys."""
    for key in range(0, num_keys, PANEL):
        panel = panels + key * stride
        for row in range(0, rows, _GROUP):
            at, to, left = x + row * stride, scores + (row * SCORES + key) * 4, rows - row
            _product(0, panel, PANEL * 4, at, stride, to, SCORES * 4, stride // 4, left, 0, 0, 0, 0)


@inner
def _weigh(
    a: _Arguments,
    first: int,
    num_keys: int,
    rows: int,
    position: int,
    scores: int,
    state: int,
    y: int,
) -> None:
    """Turn scores into weights relative to each row's new maximum; keys not seen weigh nothing."""
    shared, head_dim, window = a.shared, a.head_dim, a.window
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
def _gather(
    a: _Arguments,
    table: int,
    head: int,
    first: int,
    num_keys: int,
    end: int,
    rows: int,
    scores: int,
    y: int,
) -> None:
    """Add each row's weighted values to its sums y [rows, head_dim]."""
    row_bytes = a.head_dim * bytes_of(a.element)
    key = 0
    while key < num_keys:
        values, length = _run(a, table, a.num_kv_heads + head, first + key, end)
        count = min(length, num_keys - key)
        _add(a.element, values, row_bytes, a.head_dim, count, rows, scores + key * 4, y)
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
    """Add the values of one run."""
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
def _finish(a: _Arguments, token: int, rows: int, head: int, x: int, y: int, state: int) -> None:
    """Write sums over totals to the output; who needs them shorter has x, now free, to do it."""
    head_dim, shared, element = a.head_dim, a.shared, a.out_element
    for row in range(rows):
        first = (head * shared + row % shared) * head_dim
        at = a.out + (token + row // shared) * a.out_stride + first * bytes_of(element)
        share = np.float32(1) / floats_at(state)[2 * row + 1]
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
