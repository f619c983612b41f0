"""A list of compiled tasks, one after another in one native call: a whole step.

A step of a transformer is some three hundred loops, of a few microseconds each when it decodes;
calling them one by one from Python takes as long as they do.  A program is the list of them,
written down once and run any number of times, as a CUDA graph is: what changes between two runs is
what the memory holds, never where it lies.

Every thread goes through the whole list.  It works on an operation until there is nothing left to
take, then waits for those who still work on theirs and goes on to the next; whoever comes late
passes what is done and joins in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kernels.cpu import threads
from kernels.cpu.intrinsics import address_of, call, fetch_add
from kernels.cpu.tasks import CACHE_LINE, Task, compiled, layout_of, record_of, records_at
from kernels.cpu.threads import wait_for_none


class Operation(NamedTuple):
    """A task and its arguments, with whatever owns the memory that they point to.

    `weights`, if they are known, are where threads begin (even numbers, odd numbers) to read what
    nobody has read before.  Arguments with the fields `next_even` and `next_odd` are told there the
    `weights` of the next operation that has some, to be asked for early.
    """

    task: Task
    arguments: tuple[Any, ...]  # a NamedTuple with the field `taken`, see `kernels.cpu.threads`
    kept: tuple[Any, ...]
    weights: tuple[int, int] | None = None


@dataclass
class _Step:
    """A program's record of an operation; the record of its arguments follows."""

    task: int  # its native function
    arguments: int  # their address
    inside: int  # threads that work on it


class _Steps(NamedTuple):
    first: int
    num_steps: int
    stride: int


class Program:
    """Operations in their order; one thread at a time may run it."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._kept = [operation.kept for operation in operations]
        layouts = [layout_of(type(operation.arguments)) for operation in operations]
        largest = max((layout.itemsize for layout in layouts), default=0)
        stride = CACHE_LINE - (-largest // CACHE_LINE) * CACHE_LINE
        # One more than needed, so that the first can begin on a cache line.
        self._memory = np.zeros((len(operations) + 1) * stride // 8, np.int64)
        memory = self._memory.view(np.uint8)
        start = -memory.ctypes.data % CACHE_LINE
        starts = start + CACHE_LINE + np.arange(len(operations)) * stride
        steps: Any = np.ndarray(len(operations), layout_of(_Step), memory, start, (stride,))
        steps["task"] = [compiled(operation.task).address for operation in operations]
        steps["arguments"] = memory.ctypes.data + starts
        # From the last to the first; the next of the last are those of the next run.
        following = next((it.weights for it in operations if it.weights), (0, 0))
        for it, layout, at in reversed(list(zip(operations, layouts, starts, strict=True))):
            record = memory[at : at + layout.itemsize].view(layout)
            record[0] = it.arguments
            if "next_even" in (layout.names or ()):
                record["next_even"], record["next_odd"] = following
            following = it.weights or following
        taken = [layout.fields["taken"][1] for layout in layouts if layout.fields]
        self._taken = (starts + np.array(taken, np.int64)) // 8
        self._steps = record_of(_Steps(steps.ctypes.data, len(operations), stride))
        self._address: int = self._steps.ctypes.data

    def run(self, num_threads: int = 0) -> None:
        """Run every operation; `num_threads` 0 is as many as torch uses."""
        self._memory[self._taken] = 0
        threads.run(_run, self._address, num_threads)


_step_at = records_at(_Step)


def _run(a: _Steps, thread: int) -> None:
    for index in range(a.num_steps):
        step = _step_at(a.first + index * a.stride)
        inside = address_of(step, "inside")
        fetch_add(inside, 1)
        call(step.task, step.arguments, thread)
        fetch_add(inside, -1)
        # Nothing is left to take: when nobody is inside, all is done.
        wait_for_none(inside, -1)
