"""Attention over a paged pool on the CPU, compiled: keys and values are read where they lie.

A work item is some consecutive queries of one sequence; `WorkItems` cuts a step into them, once for
all layers.  Threads take an item and a KV head at a time.  The query heads that share the head are
the item's rows, so its keys are read once.  An item walks its context in tiles of 64 keys with a
running maximum: scores, 2^x (the scale holds log2 e), then sums of values.

Few rows meet keys as they lie; many rows (prompts) are worth turning keys into panels, and scores
are matrix products as well.  16-bit keys and values are widened in registers: every sum is float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.contract import PagedBatch
from kernels.cpu.intrinsics import (
    bfloat16_at,
    exp2,
    float16_at,
    floats_at,
    ints_at,
    prefetch,
)
from kernels.cpu.linear import ELEMENTS
from kernels.cpu.program import Operation
from kernels.cpu.rowwise import largest
from kernels.cpu.simd import FLOAT16, FLOAT32, PANEL, bytes_of, key_dots, panel_product
from kernels.cpu.tasks import Record, inner, layout_of, records_at
from kernels.cpu.threads import take

# Rows (queries by shared heads) of an item: its queries, sums and scores fit the second cache.
MAX_ROWS = 96
# Keys of a tile, and floats from a row of scores to the next: up to three beyond are written too.
TILE = 64
SCORES = TILE + 4
_LINE_BYTES = 64
# From so many rows on, turning keys into panels is cheaper than a sum across lanes for each score.
_MANY = 12
# Rows that meet one panel in registers; rows that meet four keys, or two panels of values.
_GROUP, _FEW, _KEYS = 6, 3, 4

_product = panel_product(_GROUP)
_product_of_two = panel_product(_FEW, 2)
_dots = key_dots(_FEW)


@dataclass
class _Item:
    """Some consecutive queries of one sequence."""

    sequence: int
    token: int  # the first query
    num_queries: int
    position: int  # of the first query


@dataclass
class _Step:
    """Where a step's batch lies, and the items that were made of it."""

    tables: int
    num_columns: int  # of the block tables
    starts: int
    context_lens: int
    num_sequences: int
    max_queries: int  # of an item
    items: int
    num_items: int


_item_at, _step_at = records_at(_Item), records_at(_Step)
_ITEM_BYTES = layout_of(_Item).itemsize


class WorkItems:
    """The work items of the step that is to be run; operations made once follow each `set`."""

    def __init__(self, shared: int) -> None:
        """`shared` query heads share a KV head."""
        self._step: Record = np.zeros(1, layout_of(_Step))
        self._step["max_queries"] = max(1, MAX_ROWS // shared)
        self._items: Record = np.empty(0, layout_of(_Item))
        self._batch: PagedBatch | None = None

    @property
    def items(self) -> Record:
        """The items of the last run, those that take long first."""
        return self._items[: self._step["num_items"][0]]

    @property
    def address(self) -> int:
        """Where compiled loops find the step's record."""
        address: int = self._step.ctypes.data
        return address

    def set(self, batch: PagedBatch) -> None:
        """Say which batch the next run of `plan` is to cut."""
        self._batch = batch
        if len(batch.slots) > len(self._items):
            self._items = np.empty(len(batch.slots), layout_of(_Item))
        step, tables = self._step[0], batch.block_tables
        step["tables"], step["num_columns"] = tables.data_ptr(), tables.stride(0)
        step["starts"] = batch.query_starts.data_ptr()
        step["context_lens"] = batch.context_lens.data_ptr()
        step["num_sequences"] = len(batch.context_lens)
        step["items"] = self._items.ctypes.data

    def plan(self) -> Operation:
        """Return the operation that comes before those which need the items."""
        return Operation(_plan, _PlanArguments(self.address), (self,))


class _PlanArguments(NamedTuple):
    step: int
    taken: int = 0


def _plan(a: _PlanArguments, _thread: int) -> None:
    """Cut every sequence; one thread does it all."""
    if take(a, 1) > 0:
        return
    step = _step_at(a.step)
    starts, context_lens = ints_at(step.starts), ints_at(step.context_lens)
    count = 0
    for sequence in range(step.num_sequences):
        first, last = np.int64(starts[sequence]), np.int64(starts[sequence + 1])
        past = context_lens[sequence] - last
        # From the end, where they are longest: each finds its place at once.
        left = last - first
        while left > 0:
            num_queries = (left - 1) % step.max_queries + 1
            left -= num_queries
            token = first + left
            _insert(step.items, count, sequence, token, num_queries, token + past)
            count += 1
    step.num_items = count


@inner
def _insert(
    items: int, count: int, sequence: int, token: int, num_queries: int, position: int
) -> None:
    """Put an item among `count` others, behind those that take as long or longer."""
    cost, place = (position + num_queries) * num_queries, count
    while place > 0:
        before = _item_at(items + (place - 1) * _ITEM_BYTES)
        if (before.position + before.num_queries) * before.num_queries >= cost:
            break
        moved = _item_at(items + place * _ITEM_BYTES)
        moved.sequence, moved.token = before.sequence, before.token
        moved.num_queries, moved.position = before.num_queries, before.position
        place -= 1
    item = _item_at(items + place * _ITEM_BYTES)
    item.sequence, item.token = sequence, token
    item.num_queries, item.position = num_queries, position


class _Arguments(NamedTuple):
    step: int
    query: int
    token_stride: int  # of the query; likewise head_stride
    head_stride: int
    out: int
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
) -> Operation:
    """Make out = the attention of query over one layer of the pool.

    Args:
        query: [T, Hq, D] float32, D a multiple of 16 and contiguous.
        pool: [N, L, 2, Hkv, B, D], of a dtype of `kernels.cpu.linear.ELEMENTS`.
        out: [T, Hq, D] float32, contiguous.
    """
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    num_heads = query.shape[1]
    head_bytes = block_size * head_dim * pool.itemsize
    arguments = _Arguments(
        step=items.address,
        query=query.data_ptr(),
        token_stride=query.stride(0) * 4,
        head_stride=query.stride(1) * 4,
        out=out.data_ptr(),
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
        max_rows=max(MAX_ROWS, num_heads // num_kv_heads),
    )
    return Operation(_attend, arguments, (query, pool, items, out))


def _attend(a: _Arguments, _thread: int) -> None:
    step, head_dim = _step_at(a.step), a.head_dim
    num_taken = step.num_items * a.num_kv_heads
    memory = np.empty(a.max_rows * (2 * head_dim + SCORES + 2) + TILE * head_dim, np.float32)
    x = memory.ctypes.data
    y = x + a.max_rows * head_dim * 4
    scores = y + a.max_rows * head_dim * 4
    state = scores + a.max_rows * SCORES * 4
    panels = state + a.max_rows * 2 * 4
    while True:
        taken = take(a, 1)
        if taken >= num_taken:
            return
        item = _item_at(step.items + taken // a.num_kv_heads * _ITEM_BYTES)
        head = taken % a.num_kv_heads
        table = step.tables + item.sequence * step.num_columns * 4
        rows = _begin(a, item, head, x, y, state)
        first: Any = 0
        if a.window:
            first = max(0, item.position - a.window + 1) // a.block_size * a.block_size
        end = item.position + item.num_queries
        while first < end:
            num_keys = min(TILE, end - first)
            _score(a, table, head, first, num_keys, end, rows, x, scores, panels)
            _weigh(a, first, num_keys, rows, item.position, scores, state, y)
            _gather(a, table, head, first, num_keys, end, rows, scores, y)
            first += num_keys
        _finish(a, item.token, rows, head, y, state)


@inner
def _begin(a: _Arguments, item: _Item, head: int, x: int, y: int, state: int) -> int:
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
        for line in range(0, length * row_bytes, _LINE_BYTES):
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
def _finish(a: _Arguments, token: int, rows: int, head: int, y: int, state: int) -> None:
    """Write sums over totals to the output."""
    head_dim, shared = a.head_dim, a.shared
    for row in range(rows):
        at = (token + row // shared) * a.num_heads + head * shared + row % shared
        target, sums = floats_at(a.out + at * head_dim * 4), floats_at(y + row * head_dim * 4)
        share = np.float32(1) / floats_at(state)[2 * row + 1]
        for d in range(head_dim):
            target[d] = sums[d] * share
