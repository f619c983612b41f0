"""How the attention of a step is shared: some consecutive queries of one sequence are a unit."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from kernels.contract import PagedBatch
from kernels.cpu.intrinsics import exchange, fetch_add, ints_at, read
from kernels.cpu.program import Operation
from kernels.cpu.threads import compiled, inner

# Rows (queries by shared heads) of a unit: its queries, sums and scores fit the second cache.
MAX_ROWS = 96
UNIT_WORDS = 4
# What `Units.words` hold: how many there are and where; the block tables and the entries of one;
# where the batch's other arrays are, its sequences, and the queries of a unit.
COUNT, UNITS, TABLES, COLUMNS, STARTS, LENS, NUM_SEQUENCES, MAX_QUERIES = range(8)


class Units:
    """The units of the step that is to be run; operations made once follow each `set`.

    Attributes:
        words: See above.
        memory: [at least words[COUNT], 4] int32, long ones first: a unit's sequence, first token,
            queries, and the position of the first.
    """

    def __init__(self, shared: int) -> None:
        """`shared` query heads share a KV head."""
        self.words = np.zeros(8, np.int64)
        self.words[MAX_QUERIES] = max(1, MAX_ROWS // shared)
        self.memory = np.empty((0, UNIT_WORDS), np.int32)
        self._batch: PagedBatch | None = None

    def set(self, batch: PagedBatch) -> None:
        """Say which batch the next run of `cut` is to cut."""
        self._batch = batch
        if len(batch.slots) > len(self.memory):
            self.memory = np.empty((len(batch.slots), UNIT_WORDS), np.int32)
        tables = batch.block_tables
        self.words[UNITS:MAX_QUERIES] = (
            self.memory.ctypes.data,
            tables.data_ptr(),
            tables.stride(0),
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            len(batch.context_lens),
        )

    def cut(self) -> Operation:
        """Return the operation that comes before those which need the units."""
        return Operation(task(), (self.words.ctypes.data,), (self,))


@cache
def task() -> Any:
    """Return the compiled loop over sequences; one thread does it all."""
    return compiled(_cut)


def _cut(words, _thread):  # type: ignore[no-untyped-def]
    if fetch_add(words[0], 1) > 0:
        return
    at = words[2]
    units, max_queries = read(at + UNITS * 8), read(at + MAX_QUERIES * 8)
    starts, lens = ints_at(read(at + STARTS * 8)), ints_at(read(at + LENS * 8))
    count = 0
    for sequence in range(read(at + NUM_SEQUENCES * 8)):
        first, last = np.int64(starts[sequence]), np.int64(starts[sequence + 1])
        past = lens[sequence] - last
        # From the end, where they are longest: each finds its place at once.
        left = last - first
        while left > 0:
            num_queries = (left - 1) % max_queries + 1
            left -= num_queries
            token = first + left
            _insert(units, count, sequence, token, num_queries, token + past)
            count += 1
    exchange(at + COUNT * 8, count)


@inner
def _insert(units, count, sequence, token, num_queries, position):  # type: ignore[no-untyped-def]
    """Put a unit among `count` others, behind those that take as long or longer."""
    cost, place = (position + num_queries) * num_queries, count
    while place > 0:
        before = ints_at(units + (place - 1) * UNIT_WORDS * 4)
        if (np.int64(before[3]) + before[2]) * before[2] >= cost:
            break
        for i in range(UNIT_WORDS):
            before[UNIT_WORDS + i] = before[i]
        place -= 1
    unit = ints_at(units + place * UNIT_WORDS * 4)
    unit[0], unit[1], unit[2], unit[3] = sequence, token, num_queries, position
