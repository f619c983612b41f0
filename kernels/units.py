"""How the attention of a step is shared: some consecutive queries of one sequence are a unit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.contract import PagedBatch

# Rows (queries by shared heads) of a unit: its queries, sums and scores fit the second cache.
MAX_ROWS = 96
UNIT_WORDS = 4


class Units:
    """The units of the step that is to be run; an operation made once reads each `set`."""

    def __init__(self) -> None:
        # Number of units, where they and the block tables lie, a table's length in entries.
        self.words = np.zeros(4, np.int64)
        self._kept: tuple[Any, ...] = ()

    def set(self, batch: PagedBatch, shared: int) -> None:
        """Point to the batch; `shared` query heads share a KV head."""
        units, tables = units_of(batch, shared), batch.block_tables
        self.words[:] = len(units), units.ctypes.data, tables.data_ptr(), tables.stride(0)
        self._kept = (units, tables)


def units_of(batch: PagedBatch, shared: int) -> npt.NDArray[np.int32]:
    """Return [U, 4] of (sequence, first token, queries, position of the first), long ones first."""
    max_queries = max(1, MAX_ROWS // shared)
    starts = batch.query_starts.numpy()
    num_queries = np.diff(starts)
    num_units = -(-num_queries // max_queries)
    sequence = np.repeat(np.arange(len(num_queries), dtype=np.int32), num_units)
    ends = np.cumsum(num_units)
    skipped = (np.arange(len(sequence)) - (ends - num_units)[sequence]) * max_queries
    position = (batch.context_lens.numpy() - num_queries)[sequence] + skipped
    count = np.minimum(num_queries[sequence] - skipped, max_queries)
    units = np.stack((sequence, starts[:-1][sequence] + skipped, count, position), axis=1)
    order = np.argsort(-(position + count) * count, kind="stable")
    return np.ascontiguousarray(units[order], dtype=np.int32)
