"""Attention in bfloat16: queries, keys, values and weights are bfloat16, sums are float32.

The keys and values of a tile are gathered once for all rows of a work item, into panels of pairs
(see `kernels.cpu.amx`): pairs along the head dimension for the scores, pairs of keys for the sums
of values.  Scores, weights and sums are then computed for a few rows at a time.

Tiles begin at multiples of their length in every work item, and keys that a row does not see get
weight 0, so that a row's sums are added in the same order, alone or in a prompt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from kernels.cpu import amx
from kernels.cpu.amx import STEP, STEP_BYTES, TILE_ROWS
from kernels.cpu.bfloat16_methods import Way
from kernels.cpu.dot_bfloat16 import dot_product
from kernels.cpu.intrinsics import exp2, floats_at, instruction, ints_at, shorts_at
from kernels.cpu.llvm import I16, I32, i64, load, shuffled, store
from kernels.cpu.paged import AttentionArguments, cap_scores, run_of_rows, sink_of
from kernels.cpu.rows_bfloat16 import LONG_TILE, ROWS, weigh_rows, write_bfloat16
from kernels.cpu.simd import PANEL, pair_product
from kernels.cpu.tasks import CACHE_LINE, allocate, free, inner
from kernels.cpu.threads import take
from kernels.cpu.work_items import ITEM_BYTES, Item, item_at, step_at

# Rows computed at a time: their scores and weights stay in the L1 cache.
ROWS_TOGETHER = 2 * TILE_ROWS
# Bytes of these rows' scores, weights and bounds (the keys they see), and of all three with the
# factors by which ROWS sums are rescaled.
_SCORES, _WEIGHTS = ROWS_TOGETHER * LONG_TILE * 4, ROWS_TOGETHER * LONG_TILE * 2
_BOUNDS = ROWS_TOGETHER * 8
_NEAR = _SCORES + _WEIGHTS + _BOUNDS + ROWS * 4
_PAIR_BYTES = 4
_ROW_BYTES = PANEL * _PAIR_BYTES
# Rows multiplied at a time with one panel by vectors, and with two panels by dots.
_FEW, _DOTS = 3, 12
# The base of a row that has seen no key; -inf would give weights of -inf - -inf, which is NaN.
_NOTHING_SEEN = np.float32(-1e30)
_PAIRS, _SHORTS = ir.VectorType(I32, PANEL), ir.VectorType(I16, PANEL)

_two_tiles, _one_tile = amx.tile_product(2, 2), amx.tile_product(1, 2)
_by_dots, _by_vectors = dot_product(_DOTS, 2), pair_product(_FEW)


class _Memory(NamedTuple):
    """Addresses of a work item's temporary arrays."""

    near: int  # scores, weights and bounds of a few rows
    panels: int  # keys, then values, of a tile
    x: int  # [rows, D] queries
    y: int  # [rows, D] sums
    state: int  # [rows, 2] base and total


def attend_pairs(a: AttentionArguments, _thread: int) -> None:
    """Compute work items and KV heads until none is left; the task of `kernels.cpu.attention`."""
    step, head_dim = step_at(a.step), a.head_dim
    num_taken = step.num_items * a.num_kv_heads
    # Bytes of a row: its query, its sums, its base and total; then a tile's keys and values.
    size = a.max_rows * (2 * head_dim + 4 * head_dim + 8) + 4 * head_dim * LONG_TILE
    near = allocate(size + _NEAR + CACHE_LINE)
    panels = near + -(-_NEAR // CACHE_LINE) * CACHE_LINE
    x = panels + 4 * head_dim * LONG_TILE
    y = x + a.max_rows * head_dim * 2
    memory = _Memory(near, panels, x, y, y + a.max_rows * head_dim * 4)
    if a.way == Way.TILES:
        amx.configure(a.tiles)
    while True:
        taken = take(a, 1)
        if taken >= num_taken:
            break
        item = item_at(step.items + taken // a.num_kv_heads * ITEM_BYTES)
        head = taken % a.num_kv_heads
        table = step.tables + item.sequence * step.num_columns * 4
        _begin(a, item, head, memory)
        _walk(a, table, head, item, memory)
        _finish(a, item, head, memory)
    if a.way == Way.TILES:
        amx.release()
    free(near)


@inner
def _begin(a: AttentionArguments, item: Item, head: int, memory: _Memory) -> None:
    """Copy an item's scaled queries, and initialize its state."""
    base_total = floats_at(memory.state)
    for row in range(item.num_queries * a.shared):
        token, shared_head = item.token + row // a.shared, head * a.shared + row % a.shared
        source = a.query + token * a.token_stride + shared_head * a.head_stride
        write_bfloat16(source, a.scale, memory.x + row * a.head_dim * 2, a.head_dim)
        if a.sinks:
            sink = sink_of(a, shared_head)
            base_total[2 * row] = np.ceil(sink)
            base_total[2 * row + 1] = exp2(sink - np.ceil(sink))
        else:
            base_total[2 * row] = _NOTHING_SEEN
            base_total[2 * row + 1] = np.float32(0)


@inner
def _walk(a: AttentionArguments, table: int, head: int, item: Item, memory: _Memory) -> None:
    """Add up the weighted values of an item's context, tile by tile."""
    first, end = 0, item.position + item.num_queries
    if a.window:
        first = max(0, item.position - a.window + 1) // a.block_size * a.block_size
    tile = first // LONG_TILE * LONG_TILE
    is_added = 0
    while tile < end:
        num_keys = min(LONG_TILE, end - tile)
        _gather(a, table, head, first, tile, num_keys, end, memory.panels)
        for row in range(0, item.num_queries * a.shared, ROWS_TOGETHER):
            _add(a, item, tile, num_keys, row, memory, is_added)
        tile += LONG_TILE
        is_added = 1


@inner
def _gather(
    a: AttentionArguments,
    table: int,
    head: int,
    first: int,
    tile: int,
    num_keys: int,
    end: int,
    panels: int,
) -> None:
    """Copy a tile's keys and values, those from position `first` on, into panels."""
    head_dim, keys, values = a.head_dim, panels, panels + LONG_TILE * a.head_dim * 2
    key = max(0, first - tile)
    # Values that are not copied must be 0: unwritten memory may be NaN, and so is NaN times weight
    # 0.
    pair_values(0, key, 0, head_dim, values)
    while key < num_keys:
        at, length = run_of_rows(a, table, head, tile + key, end)
        count = min(length, num_keys - key)
        transpose_keys(at, count, key, head_dim, keys)
        at, length = run_of_rows(a, table, a.num_kv_heads + head, tile + key, end)
        pair_values(at, count, key, head_dim, values)
        key += count
    pair_values(0, -num_keys % STEP, num_keys, head_dim, values)


@inner
def _add(
    a: AttentionArguments,
    item: Item,
    tile: int,
    num_keys: int,
    row: int,
    memory: _Memory,
    is_added: int,
) -> None:
    """Write a tile's weighted values to the sums of rows from `row` on; add them if `is_added`."""
    head_dim, panels, near = a.head_dim, memory.panels, memory.near
    scores, weights = near, near + _SCORES
    rows = min(ROWS_TOGETHER, item.num_queries * a.shared - row)
    first, last = item.position + row // a.shared, item.position + (row + rows - 1) // a.shared
    # Skip whole steps of keys that none of the rows sees.
    seen = min(num_keys, last + 1 - tile)
    if seen <= 0:
        return
    depth = -(-seen // STEP) * STEP
    queries, sums = memory.x + row * head_dim * 2, memory.y + row * head_dim * 4
    values = panels + LONG_TILE * head_dim * 2
    is_whole = tile + LONG_TILE <= first + 1 and (a.window == 0 or tile > last - a.window)
    if not is_whole:
        _bound(a, item.position - tile, row, rows, near)
    multiply(a.way, rows, queries, head_dim, head_dim, panels, depth, scores, LONG_TILE, 0)
    if a.cap:
        cap_scores(floats_at(scores), 0, rows * LONG_TILE, a.cap)
    _weigh(a, rows, is_whole, near, memory.state + row * 8, sums, is_added)
    multiply(a.way, rows, weights, LONG_TILE, depth, values, head_dim, sums, head_dim, is_added)


@inner
def _bound(a: AttentionArguments, position: int, row: int, rows: int, near: int) -> None:
    """Write the range of a tile's keys that each row sees; `position` is relative to the tile."""
    start_stop = ints_at(near + _SCORES + _WEIGHTS)
    for index in range(rows):
        stop = position + (row + index) // a.shared + 1
        start_stop[2 * index] = stop - a.window if a.window else 0
        start_stop[2 * index + 1] = stop


@inner
def _weigh(
    a: AttentionArguments,
    rows: int,
    is_whole: bool,
    near: int,
    state: int,
    sums: int,
    is_added: int,
) -> None:
    """Turn scores into weights, and rescale the sums of rows whose base changes."""
    scores, weights = near, near + _SCORES
    bounds, kept = weights + _WEIGHTS, weights + _WEIGHTS + _BOUNDS
    factors = floats_at(kept)
    for row in range(0, rows, ROWS):
        at, to = scores + row * LONG_TILE * 4, weights + row * LONG_TILE * 2
        is_changed = weigh_rows(at, to, 0 if is_whole else bounds + row * 8, state + row * 8, kept)
        if is_changed and is_added:
            for index in range(min(ROWS, rows - row)):
                values = floats_at(sums + (row + index) * a.head_dim * 4)
                for d in range(a.head_dim):
                    values[d] *= factors[index]


@inner
def _finish(a: AttentionArguments, item: Item, head: int, memory: _Memory) -> None:
    """Divide sums by softmax denominators and write the output."""
    for row in range(item.num_queries * a.shared):
        share = np.float32(1) / floats_at(memory.state)[2 * row + 1]
        at = a.out + (item.token + row // a.shared) * a.out_stride
        at += (head * a.shared + row % a.shared) * a.head_dim * 2
        write_bfloat16(memory.y + row * a.head_dim * 4, share, at, a.head_dim)


@inner
def transpose_keys(keys: int, count: int, first: int, head_dim: int, panels: int) -> None:
    """Transpose `count` adjacent keys, numbered from `first` on, into panels.

    Panels are [keys / 16, D / 2, 16, 2].
    """
    pairs, j = head_dim // 2, 0
    while j < count:
        key, source = first + j, keys + j * head_dim * 2
        column = panels + key // PANEL * pairs * _ROW_BYTES + key % PANEL * _PAIR_BYTES
        if key % PANEL == 0 and count - j >= PANEL:
            for pair in range(0, pairs, PANEL):
                _transpose(source + pair * _PAIR_BYTES, head_dim * 2, column + pair * _ROW_BYTES)
            j += PANEL
        else:
            pairs_of_key, target = ints_at(source), ints_at(column)
            for pair in range(pairs):
                target[pair * PANEL] = pairs_of_key[pair]
            j += 1


@inner
def pair_values(values: int, count: int, first: int, head_dim: int, panels: int) -> None:
    """Copy `count` adjacent values, numbered from `first` on, into panels; address 0 is zeros.

    Panels are [D / 16, LONG_TILE / 2, 16, 2].
    """
    panel_bytes = LONG_TILE // 2 * _ROW_BYTES
    if values and first % 2 == 0 and count % 2 == 0:
        for j in range(0, count, 2):
            row = panels + (first + j) // 2 * _ROW_BYTES
            for panel in range(head_dim // PANEL):
                at = values + (j * head_dim + panel * PANEL) * 2
                _pair(at, at + head_dim * 2, row + panel * panel_bytes)
        return
    for j in range(count):
        row = panels + (first + j) // 2 * _ROW_BYTES + (first + j) % 2 * 2
        for panel in range(head_dim // PANEL):
            target = shorts_at(row + panel * panel_bytes)
            if values == 0:
                for d in range(PANEL):
                    target[2 * d] = 0
            else:
                source = shorts_at(values + (j * head_dim + panel * PANEL) * 2)
                for d in range(PANEL):
                    target[2 * d] = source[d]


@instruction(types.void, *[types.int64] * 3)
def _transpose(b: ir.IRBuilder, source: Any, stride: Any, target: Any) -> None:
    """Transpose PANEL rows of PANEL pairs each; source rows are `stride` bytes apart."""
    rows = [load(b, b.add(source, b.mul(stride, i64(row))), _PAIRS, 2) for row in range(PANEL)]
    # In each of four rounds, pairs of rows exchange every other group of `width` lanes.
    width = PANEL // 2
    while width:
        low = [lane if lane & width == 0 else lane - width + PANEL for lane in range(PANEL)]
        high = [lane + width if lane & width == 0 else lane + PANEL for lane in range(PANEL)]
        for row in range(PANEL):
            if row & width == 0:
                pair = rows[row], rows[row + width]
                rows[row], rows[row + width] = (shuffled(b, *pair, lanes) for lanes in (low, high))
        width //= 2
    for row, turned in enumerate(rows):
        store(b, turned, b.add(target, i64(row * _ROW_BYTES)))


@instruction(types.void, *[types.int64] * 3)
def _pair(b: ir.IRBuilder, first: Any, second: Any, target: Any) -> None:
    """Interleave PANEL 16-bit numbers from each of two addresses."""
    lanes = [lane // 2 + lane % 2 * PANEL for lane in range(2 * PANEL)]
    left, right = (load(b, at, _SHORTS, 2) for at in (first, second))
    store(b, shuffled(b, left, right, lanes), target)


@inner
def multiply(
    way: int,
    rows: int,
    x: int,
    x_size: int,
    depth: int,
    panels: int,
    columns: int,
    y: int,
    y_size: int,
    is_added: int,
) -> None:
    """Compute y [rows, columns] = x [rows, depth] w, plus the earlier y if `is_added`.

    x is bfloat16 in rows of `x_size` elements, and panels of w have space for as many; y is float32
    in rows of `y_size`; depth and columns are multiples of 32.  Up to a multiple of ROWS_TOGETHER
    rows are computed, so x and y must have memory for them.
    """
    num_panels, num_steps = columns // PANEL, depth // STEP
    panel_bytes, x_stride, y_stride = x_size // STEP * STEP_BYTES, x_size * 2, y_size * 4
    if way == Way.VECTORS:
        for panel in range(num_panels):
            w, to = panels + panel * panel_bytes, y + panel * PANEL * 4
            for row in range(0, rows, _FEW):
                at, sums = x + row * x_stride, to + row * y_stride
                _by_vectors(w, at, x_stride, sums, y_stride, num_steps, rows - row, is_added)
        return
    if way == Way.DOTS:
        for panel in range(0, num_panels, 2):
            w, to = panels + panel * panel_bytes, y + panel * PANEL * 4
            for row in range(0, rows, _DOTS):
                at, sums, left = x + row * x_stride, to + row * y_stride, rows - row
                _by_dots(w, at, x_stride, sums, y_stride, num_steps, left, is_added, panel_bytes, w)
        return
    for row in range(0, rows, ROWS_TOGETHER):
        at, to = x + row * x_stride, y + row * y_stride
        for panel in range(0, num_panels, 2):
            w, sums = panels + panel * panel_bytes, to + panel * PANEL * 4
            if rows - row > TILE_ROWS:
                _two_tiles(w, at, x_stride, sums, y_stride, num_steps, is_added, panel_bytes, 0)
            else:
                _one_tile(w, at, x_stride, sums, y_stride, num_steps, is_added, panel_bytes, 0)
