"""Compiled loops one after another, in one native call.

A step of a transformer is some three hundred loops, of a few microseconds each when it decodes;
calling them one by one from Python takes as long as they do.  A program is the list of them,
written down once and run any number of times, as a CUDA graph is: what changes between two runs is
what the memory holds, never where it lies.

Every thread goes through the whole list.  It takes shares of an operation until there are none
left, then waits for those who still work on theirs and goes on to the next; whoever comes late
passes what is done and joins in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.cpu import threads as team
from kernels.cpu.intrinsics import call, fetch_add, read
from kernels.cpu.threads import compiled, wait_for_none

# Words of an operation in memory: its function and the threads inside, then on cache lines of their
# own what `kernels.cpu.threads` calls a task's words.
_FUNCTION, _INSIDE, _TASK, _ROW = 0, 1, 8, 40


class Operation(NamedTuple):
    """A task and its own words: addresses, sizes and strides in bytes.

    `kept` is whatever owns the memory behind the addresses.  `weights`, if any, are the addresses
    where threads begin (even numbers, odd numbers) to read what nobody has read before: the words
    after the own words of each operation are those of the next one that has some, to be asked for
    early.
    """

    task: Any
    words: tuple[int, ...]
    kept: tuple[Any, ...]
    weights: tuple[int, int] | None = None


class Program:
    """Operations in their order; one thread at a time may run it."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._kept = [operation.kept for operation in operations]
        # One row more than needed, so that the first can begin on a cache line.
        memory = np.zeros(((len(operations) + 1) * _ROW,), np.int64)
        skipped = -(memory.ctypes.data // 8) % 8
        rows = memory[skipped : skipped + len(operations) * _ROW].reshape(-1, _ROW)
        # From the last to the first; the next of the last are those of the next run.
        following = next((it.weights for it in operations if it.weights), (0, 0))
        for row, it in zip(rows[::-1], reversed(operations), strict=True):
            row[_FUNCTION] = it.task.address
            row[_TASK] = row.ctypes.data + (_TASK + 1) * 8
            row[_TASK + 2 : _TASK + 4 + len(it.words)] = *it.words, *following
            following = it.weights or following
        self._counters = rows[:, _TASK + 1]
        self._words = np.array([rows.ctypes.data, len(rows)], np.int64)

    def run(self, num_threads: int = 0) -> None:
        """Run every operation; `num_threads` 0 is as many as torch uses."""
        self._counters[:] = 0
        team.run(task(), self._words.ctypes.data, num_threads)


@cache
def task() -> Any:
    """Return the compiled loop over operations."""
    return compiled(_run)


def _run(words, thread):  # type: ignore[no-untyped-def]
    for index in range(words[1]):
        row = words[0] + index * _ROW * 8
        fetch_add(row + _INSIDE * 8, 1)
        call(read(row + _FUNCTION * 8), row + _TASK * 8, thread)
        fetch_add(row + _INSIDE * 8, -1)
        # No share is left: when nobody is inside, all are done.
        wait_for_none(row + _INSIDE * 8, -1)
