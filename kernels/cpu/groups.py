"""Which rows meet which matrix of a stack: rows of a group lie together and meet one matrix.

A product with one matrix is one group of all rows.  What experts are given is many: which, and how
many rows each, is known when the step runs, so that threads read it from memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.cpu.intrinsics import address_of, atomic_load, ints_at
from kernels.cpu.tasks import inner, record_of, records_at
from kernels.cpu.threads import compiled_next_chunk, next_chunk, take_chunk


class Table(NamedTuple):
    """What threads read; tasks that make groups write it."""

    num_groups: int
    matrices: int  # [G] int32: which of the stack
    starts: int  # [G + 1] int32: group g has rows [starts[g], starts[g + 1])


table_at = records_at(Table)


class Groups:
    """The rows that meet each of `num_matrices`: at first all `num_rows` meet the first."""

    def __init__(self, num_rows: int, num_matrices: int = 1) -> None:
        self.num_rows = num_rows
        self._matrices = torch.zeros(num_matrices, dtype=torch.int32)
        self._starts = torch.zeros(num_matrices + 1, dtype=torch.int32)
        self._starts[1:] = num_rows
        self._table = record_of(Table(1, self._matrices.data_ptr(), self._starts.data_ptr()))
        self.address: int = self._table.ctypes.data


@inner
def take_units(a: Any, thread: int) -> tuple[int, int, int, int]:
    """Take some units of one matrix and the rows they meet: (unit, count, first row, last row + 1).

    Units are numbered on from matrix to matrix of the stack.  A count of 0: nothing is left.  The
    arguments have the fields `groups`, `num_units` of a matrix, `num_threads` and `taken`.
    """
    table = table_at(a.groups)
    total = table.num_groups * a.num_units
    first, count = take_chunk(a, total, a.num_units, a.num_threads, thread)
    if count == 0:
        return 0, 0, 0, 0
    group, starts = first // a.num_units, ints_at(table.starts)
    begin, end = int(starts[group]), int(starts[group + 1])
    return _in_stack(table, first, a.num_units), count, begin, end


@inner
def coming_weights(a: Any, thread: int, size: int) -> int:
    """Return where the weights lie that a thread likely reads next: here, or in the next product.

    The arguments are those of `take_units`, with `weight` and what `Operation.weights` asks for;
    a unit has `size` bytes.
    """
    table = table_at(a.groups)
    taken, total = atomic_load(address_of(a, "taken")), table.num_groups * a.num_units
    first, count = compiled_next_chunk(taken, total, a.num_units, a.num_threads, thread)
    if count:
        return a.weight + _in_stack(table, first, a.num_units) * size  # type: ignore[no-any-return]
    return a.next_odd if thread % 2 else a.next_even  # type: ignore[no-any-return]


@inner
def _in_stack(table: Any, unit: int, num_units: int) -> int:
    """Return which unit of the stack is the one of this number among those of the groups."""
    group = unit // num_units
    return int(ints_at(table.matrices)[group]) * num_units + unit - group * num_units


def first_weights(address: int, num_units: int, num_threads: int, size: int) -> tuple[int, int]:
    """Return where threads of even and of odd numbers begin to read one matrix."""
    even, odd = (next_chunk(0, num_units, num_units, num_threads, it)[0] for it in range(2))
    return address + even * size, address + odd * size
