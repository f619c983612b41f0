"""Runs compiled tasks on several threads that share the work.

A task is a loop of which every thread runs a part.  Its arguments have a field `taken`, 0 at first:
how much of the loop threads have taken.  Each takes the next rounds until none are left (`take`),
or runs of them from both ends (`take_chunk`).

The caller works too and waits for no one who has not begun: a helper that the system runs late, on
cores that others want as well, finds the gate closed and costs nothing.  OpenMP's teams (torch's)
wait for every member at every end instead; with a second worker on the same two cores that is a
time slice each, two hundred times a step.  A helper without work looks for some for about 100 us
and then sleeps.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch
from numba import types

from kernels.cpu.intrinsics import (
    address_of,
    atomic_load,
    call,
    compare_exchange,
    exchange,
    fetch_add,
    pause,
)
from kernels.cpu.tasks import CACHE_LINE, Shared, Task, compiled, inner, layout_of

# The gate is one number: how many helpers are inside, whether it is open, and of which task it is.
_INSIDE, _OPEN, _NEXT = (1 << 16) - 1, 1 << 16, 1 << 17
# Looks at a word, some 25 ns each, before a thread lets others have its core.
PATIENCE = 4000
# The most that a thread takes at a time.
MAX_CHUNK = 8
# A count of chunks taken has those from the front in its low half, from the back in its high one.
_BACK = 1 << 32

_sem_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@dataclass
class _Board:
    """Where the threads of a team meet."""

    gate: Shared
    task: int  # its native function
    arguments: int  # their address
    sleepers: Shared  # helpers that sleep, or are about to
    semaphore: Shared  # on which they do: a sem_t


@inner
def take(arguments: Any, count: int) -> int:
    """Take the next `count` rounds of a loop; return the first of them, maybe past the end."""
    first: int = fetch_add(address_of(arguments, "taken"), count)
    return first


@inner
def for_each_row(arguments: Any, work: Callable[..., None], scratch: int) -> None:
    """Call `work(arguments, row, scratch)` for rows of a loop until none of `num_rows` is left."""
    at_a_time = max(1, min(MAX_CHUNK, arguments.num_rows // MAX_CHUNK))
    while True:
        first = take(arguments, at_a_time)
        if first >= arguments.num_rows:
            return
        for row in range(first, min(first + at_a_time, arguments.num_rows)):
            work(arguments, row, scratch)


@inner
def take_chunk(
    arguments: Any, total: int, run: int, num_threads: int, thread: int
) -> tuple[int, int]:
    """Take what `next_chunk` says: (first, count), count 0 if nothing is left."""
    address = address_of(arguments, "taken")
    while True:
        taken = atomic_load(address)
        first, count = compiled_next_chunk(taken, total, run, num_threads, thread)
        more = count * (_BACK if thread % 2 else 1)
        if count == 0 or compare_exchange(address, taken, taken + more):
            return first, count


def next_chunk(taken: int, total: int, run: int, num_threads: int, thread: int) -> tuple[int, int]:
    """Return (first, count) of a thread's next chunk: even threads from the front, odd ones back.

    Each reads on where it was, so what it asked memory for early is what it takes.  Two that take
    in turns from one end now and then swap, and both find what the other asked for: a fifth of the
    time of a step with one row.  Towards the middle chunks become smaller, and nobody waits long
    for the last.  Of more than two threads several share an end.  `total` is made of runs of `run`,
    and a chunk lies within one.
    """
    front, back = taken % _BACK, taken // _BACK
    left = total - front - back
    if left == 0:
        return front, 0
    # A power of two: a product does not meet an odd number of panels at once.
    count = MAX_CHUNK
    while num_threads * count > left and count > 1:
        count //= 2
    if thread % 2:
        end = total - back
        count = min(count, (end - 1) % run + 1)
        return end - count, count
    return front, min(count, run - front % run)


compiled_next_chunk = inner(next_chunk)


def run(task: Task, arguments: int, num_threads: int = 0) -> None:
    """Run a task on the arguments at an address; `num_threads` 0 is as many as torch uses.

    Returns when all is done.  The interpreter lock is released meanwhile.
    """
    team = team_of(num_threads or torch.get_num_threads())
    # Another engine of this process may be using the helpers.
    if team is not None and team.lock.acquire(blocking=False):
        try:
            team.run(task, arguments)
        finally:
            team.lock.release()
    else:
        native(task)(arguments, 0)


@cache
def team_of(num_threads: int) -> Team | None:
    """Return the team of so many threads with the caller; None where the caller works alone."""
    # Elsewhere semaphores have other names; one thread is slower, not wrong.
    return Team(num_threads - 1) if num_threads > 1 and sys.platform == "linux" else None


class Team:
    """Helper threads that live as long as the process; the caller of a task holds `lock`."""

    def __init__(self, num_helpers: int) -> None:
        self.lock = Lock()
        layout = layout_of(_Board)
        memory = np.zeros(layout.itemsize + CACHE_LINE, np.uint8)
        skipped = -memory.ctypes.data % CACHE_LINE
        board = memory[skipped:][: layout.itemsize].view(layout)
        self._task, self._arguments = board["task"], board["arguments"]
        self._board: int = board.ctypes.data
        ctypes.CDLL(None).sem_init(ctypes.c_void_p(board["semaphore"].ctypes.data), 0, 0)
        self._lead, help_ = native(_lead), native(_help)

        def live(thread: int) -> None:
            help_(board.ctypes.data, thread)

        for thread in range(1, num_helpers + 1):
            Thread(target=live, args=(thread,), name="kernels", daemon=True).start()

    def run(self, task: Task, arguments: int) -> None:
        """Run a task here and on every helper that comes in time."""
        # Nobody is inside the gate, so nobody reads these.
        self._task[0], self._arguments[0] = compiled(task).address, arguments
        self._lead(self._board, 0)


@inner
def wait_for_none(address: int, mask: int) -> None:
    """Wait until no bit of the mask is set in the int64 at an address."""
    waited = 0
    while atomic_load(address) & mask:
        pause()
        waited += 1
        if waited > PATIENCE:
            _sched_yield()


@cache
def native(task: Task) -> Callable[[int, int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(compiled(task).address)


def _lead(board: _Board, thread: int) -> None:
    """Open the gate, work, close it, wait for those inside."""
    gate = address_of(board, "gate")
    exchange(gate, atomic_load(gate) + _NEXT + _OPEN)
    for _ in range(exchange(address_of(board, "sleepers"), 0)):
        _sem_post(address_of(board, "semaphore"))
    call(board.task, board.arguments, thread)
    fetch_add(gate, -_OPEN)
    wait_for_none(gate, _INSIDE)


def _help(board: _Board, thread: int) -> None:
    """Enter whenever the gate is open for a task not seen yet; for ever."""
    gate = address_of(board, "gate")
    seen, waited = 0, 0
    while True:
        state = atomic_load(gate)
        if state & _OPEN and state // _NEXT != seen:
            if compare_exchange(gate, state, state + 1):
                call(board.task, board.arguments, thread)
                fetch_add(gate, -1)
                seen = state // _NEXT
                waited = 0
        elif waited < PATIENCE:
            waited += 1
            pause()
        else:
            # Announced first, then looked again: the leader opens first, then wakes.  A wake-up
            # that comes too late ends the next sleep early, no more.
            fetch_add(address_of(board, "sleepers"), 1)
            state = atomic_load(gate)
            if not (state & _OPEN and state // _NEXT != seen):
                _sem_wait(address_of(board, "semaphore"))
            waited = 0
