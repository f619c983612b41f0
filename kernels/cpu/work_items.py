"""Split a step's attention into work items, once for all layers.

A work item is some consecutive queries of one sequence; a thread takes an item and a KV head at a
time, the most expensive items first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kernels.contract import PagedBatch
from kernels.cpu.intrinsics import ints_at
from kernels.cpu.program import Operation
from kernels.cpu.tasks import Record, inner, layout_of, records_at
from kernels.cpu.threads import take

# The most rows (queries times the heads that share a KV head) of an item: their queries, sums and
# scores fit the L2 cache.
MAX_ROWS = 192


@dataclass
class Item:
    """Some consecutive queries of one sequence."""

    sequence: int
    token: int  # the first query
    num_queries: int
    position: int  # of the first query


@dataclass
class Step:
    """Addresses of a step's batch, and the work items that it was split into."""

    tables: int
    num_columns: int  # of the block tables
    starts: int
    context_lens: int
    num_sequences: int
    max_queries: int  # of an item
    items: int
    num_items: int


item_at, step_at = records_at(Item), records_at(Step)
ITEM_BYTES = layout_of(Item).itemsize


class WorkItems:
    """The work items of the next step; operations use the batch of the latest `set`."""

    def __init__(self, shared: int) -> None:
        """`shared`: how many query heads share a KV head."""
        self._step: Record = np.zeros(1, layout_of(Step))
        self._step["max_queries"] = max(1, MAX_ROWS // shared)
        self._items: Record = np.empty(0, layout_of(Item))
        self._batch: PagedBatch | None = None

    @property
    def items(self) -> Record:
        """The items of the last run, the most expensive first."""
        return self._items[: self._step["num_items"][0]]

    @property
    def address(self) -> int:
        """Address of the step's record, for compiled loops."""
        address: int = self._step.ctypes.data
        return address

    def set(self, batch: PagedBatch) -> None:
        """Set the batch that the next run of `plan` splits."""
        self._batch = batch
        if len(batch.slots) > len(self._items):
            self._items = np.empty(len(batch.slots), layout_of(Item))
        step, tables = self._step[0], batch.block_tables
        step["tables"], step["num_columns"] = tables.data_ptr(), tables.stride(0)
        step["starts"] = batch.query_starts.data_ptr()
        step["context_lens"] = batch.context_lens.data_ptr()
        step["num_sequences"] = len(batch.context_lens)
        step["items"] = self._items.ctypes.data

    def plan(self) -> Operation:
        """Return an operation that splits the batch of the latest `set` into work items.

        It runs once per step, before the attention of the first layer.
        """
        return Operation(_plan, _PlanArguments(self.address), (self,))


class _PlanArguments(NamedTuple):
    step: int
    taken: int = 0


def _plan(a: _PlanArguments, _thread: int) -> None:
    """Split every sequence into items; a single thread does all of it."""
    if take(a, 1) > 0:
        return
    step = step_at(a.step)
    starts, context_lens = ints_at(step.starts), ints_at(step.context_lens)
    count = 0
    for sequence in range(step.num_sequences):
        first, last = np.int64(starts[sequence]), np.int64(starts[sequence + 1])
        past = context_lens[sequence] - last
        # From the end, where items cost most, so that each is inserted near its place at once.
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
    """Insert an item into `count` others, sorted by descending cost."""
    cost, place = (position + num_queries) * num_queries, count
    while place > 0:
        before = item_at(items + (place - 1) * ITEM_BYTES)
        if (before.position + before.num_queries) * before.num_queries >= cost:
            break
        moved = item_at(items + place * ITEM_BYTES)
        moved.sequence, moved.token = before.sequence, before.token
        moved.num_queries, moved.position = before.num_queries, before.position
        place -= 1
    item = item_at(items + place * ITEM_BYTES)
    item.sequence, item.token = sequence, token
    item.num_queries, item.position = num_queries, position
