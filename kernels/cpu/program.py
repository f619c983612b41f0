"""A program: a list of compiled tasks, a whole step, that runs in one native call.

A transformer step has some three hundred loops, of a few microseconds each in decode; calling them
one by one from Python takes as long as they do.  A program is built once and run any number of
times, like a CUDA graph: between runs the contents of memory change, the addresses do not.

Every thread runs the whole list.  It works on an operation until there is nothing left to take,
waits for the threads that still work on it, and continues with the next; a thread that starts late
skips finished operations and joins in.
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
    """A task and its arguments, with the owners of the memory to which they point.

    `weights`, if known, are the addresses at which threads of even and of odd numbers begin to read
    weights.  If the arguments have the fields `next_even` and `next_odd`, these are set to the
    `weights` of the next operation that has them, to prefetch.
    """

    task: Task
    arguments: tuple[Any, ...]  # a NamedTuple with the field `taken`, see `kernels.cpu.threads`
    kept: tuple[Any, ...]
    weights: tuple[int, int] | None = None


@dataclass
class _Step:
    """A program's record of an operation; the record of its arguments follows."""

    task: int  # address of its native function
    arguments: int  # their address
    inside: int  # number of threads that work on it


class _Steps(NamedTuple):
    first: int
    num_steps: int
    stride: int


class Program:
    """Operations in the order in which they run; one thread at a time may run the program."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._kept = [operation.kept for operation in operations]
        layouts = [layout_of(type(operation.arguments)) for operation in operations]
        largest = max((layout.itemsize for layout in layouts), default=0)
        stride = CACHE_LINE - (-largest // CACHE_LINE) * CACHE_LINE
        # One record more than needed, so that the first can begin on a cache line.
        self._memory = np.zeros((len(operations) + 1) * stride // 8, np.int64)
        memory = self._memory.view(np.uint8)
        start = -memory.ctypes.data % CACHE_LINE
        starts = start + CACHE_LINE + np.arange(len(operations)) * stride
        steps: Any = np.ndarray(len(operations), layout_of(_Step), memory, start, (stride,))
        steps["task"] = [compiled(operation.task).address for operation in operations]
        steps["arguments"] = memory.ctypes.data + starts
        # From the last to the first; the operation after the last is the first of the next run.
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
        """Run every operation; `num_threads` 0 means as many as torch uses."""
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
        # Nothing is left to take, so the operation is done when no thread is inside.
        wait_for_none(inside, -1)
