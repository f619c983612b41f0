"""Groups of rows: each group is multiplied by one matrix of a stack.

A product with one matrix has one group of all rows.  A product with experts has many: which, and
with how many rows, is known only when the step runs, so threads read the groups from memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.cpu.intrinsics import address_of, atomic_load, floats_at, ints_at
from kernels.cpu.simd import PANEL, add_scaled
from kernels.cpu.tasks import inner, record_of, records_at
from kernels.cpu.threads import compiled_next_chunk, next_chunk, take_chunk


class Table(NamedTuple):
    """The groups as threads read them; the tasks that form groups write them."""

    num_groups: int
    matrices: int  # [G] int32 number of each group's matrix in the stack
    starts: int  # [G + 1] int32: group g has rows [starts[g], starts[g + 1])
    tokens: int  # see `Groups`; so are shares
    shares: int


table_at = records_at(Table)


class Groups:
    """The rows that are multiplied by each of `num_matrices`: initially all rows by the first.

    Attributes:
        tokens: [num_rows] int32 row of y to which a product `is_by_token` adds each row.
        shares: [num_rows] float32 factor of each row in that sum.
    """

    def __init__(self, num_rows: int, num_matrices: int = 1) -> None:
        self.num_rows = num_rows
        self.tokens = torch.zeros(num_rows, dtype=torch.int32)
        self.shares = torch.zeros(num_rows)
        self._matrices = torch.zeros(num_matrices, dtype=torch.int32)
        self._starts = torch.zeros(num_matrices + 1, dtype=torch.int32)
        self._starts[1:] = num_rows
        self._table = record_of(
            Table(
                num_groups=1,
                matrices=self._matrices.data_ptr(),
                starts=self._starts.data_ptr(),
                tokens=self.tokens.data_ptr(),
                shares=self.shares.data_ptr(),
            )
        )
        self.address: int = self._table.ctypes.data


@inner
def next_units(a: Any, thread: int, group: int, unit: int, count: int) -> tuple[int, int, int]:
    """Take the next units of one matrix: (group, first unit, count); a unit is one or two panels.

    A count of 0 means that nothing was taken yet, or that nothing is left.  The arguments have the
    fields `groups`, `num_units` of a matrix, `is_by_token`, `num_threads` and `taken`.  Rows are
    added to those of their tokens in the order of the matrices: a thread that takes units of the
    first matrix takes the same units of all others.
    """
    num_groups = table_at(a.groups).num_groups
    if a.is_by_token and count and group + 1 < num_groups:
        return group + 1, unit, count
    total = a.num_units * (1 if a.is_by_token else num_groups)
    first, count = take_chunk(a, total, a.num_units, a.num_threads, thread)
    return first // a.num_units, first % a.num_units, count


@inner
def rows_of(a: Any, group: int) -> tuple[int, int]:
    """Return the first row of a group, and the row after its last."""
    starts = ints_at(table_at(a.groups).starts)
    return int(starts[group]), int(starts[group + 1])


@inner
def in_stack(a: Any, group: int, unit: int) -> int:
    """Return the number in the stack of a unit of the group's matrix."""
    matrix = int(ints_at(table_at(a.groups).matrices)[group])
    return matrix * a.num_units + unit  # type: ignore[no-any-return]


@inner
def coming_weights(a: Any, thread: int, group: int, unit: int, size: int) -> int:
    """Return the address of the weights that a thread likely reads next, to prefetch.

    It may be in the next product.  The arguments have the fields for `next_units`, `weight`, and
    those that `Operation` sets; a unit has `size` bytes.
    """
    num_groups, taken = table_at(a.groups).num_groups, atomic_load(address_of(a, "taken"))
    count, total = 1, a.num_units * (1 if a.is_by_token else num_groups)
    if a.is_by_token and group + 1 < num_groups:
        group += 1
    else:
        first, count = compiled_next_chunk(taken, total, a.num_units, a.num_threads, thread)
        group, unit = first // a.num_units, first % a.num_units
    if count:
        return a.weight + in_stack(a, group, unit) * size  # type: ignore[no-any-return]
    return a.next_odd if thread % 2 else a.next_even  # type: ignore[no-any-return]


@inner
def add_to_tokens(
    a: Any, sums: int, stride: int, num_panels: int, column: int, begin: int, end: int
) -> None:
    """Add rows [begin, end) of `sums`, times their shares, to the rows of their tokens in y.

    `column` is the first column.  The arguments have the fields `groups`, `y` and `y_stride`.
    """
    table = table_at(a.groups)
    tokens, shares = ints_at(table.tokens), floats_at(table.shares)
    for row in range(begin, end):
        share, to = shares[row], a.y + tokens[row] * a.y_stride + column * 4
        made = sums + (row - begin) * stride
        for offset in range(0, num_panels * PANEL * 4, PANEL * 4):
            add_scaled(to + offset, made + offset, share)


def first_weights(address: int, num_units: int, num_threads: int, size: int) -> tuple[int, int]:
    """Return the addresses at which threads of even and of odd numbers begin to read a matrix."""
    even, odd = (next_chunk(0, num_units, num_units, num_threads, it)[0] for it in range(2))
    return address + even * size, address + odd * size
