"""Run compiled tasks on several threads that share the work.

A task is a loop whose iterations are divided among threads.  Its arguments have a field `taken`,
initially 0, that counts the iterations taken so far.  Each thread takes the next ones until none
are left (`take`), or chunks from both ends (`take_chunk`).

The caller works too, and does not wait for helpers that have not started: a helper that the system
schedules late, on cores that others use as well, finds the gate closed and costs nothing.  OpenMP's
teams (torch's) wait for every member at the end of every loop instead; with a second worker on the
same two cores that takes a time slice each, two hundred times a step.  A helper without work polls
for about 100 us, then sleeps.
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

# The gate is one integer: how many helpers are inside, whether it is open, and the task's number.
_INSIDE, _OPEN, _NEXT = (1 << 16) - 1, 1 << 16, 1 << 17
# Polls of a word, some 25 ns each, before a thread yields its core.
PATIENCE = 4000
# The most iterations that a thread takes at a time.
MAX_CHUNK = 8
_BACK = 1 << 32  # one iteration taken from the back, see `take_chunk`

_sem_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@dataclass
class _Board:
    """The state shared by the threads of a team."""

    gate: Shared
    task: int  # address of its native function
    arguments: int  # their address
    sleepers: Shared  # helpers that sleep, or are about to
    semaphore: Shared  # the sem_t on which they sleep


@inner
def take(arguments: Any, count: int) -> int:
    """Take the next `count` iterations of a loop; return the first, which may be past the end."""
    first: int = fetch_add(address_of(arguments, "taken"), count)
    return first


@inner
def for_each_row(arguments: Any, work: Callable[..., None], scratch: int) -> None:
    """Call `work(arguments, row, scratch)` for the rows that this thread takes."""
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
    """Take a thread's next chunk of `total` iterations: (first, count), count 0 if none are left.

    Even threads take from the front, odd ones from the back, so that each goes on where it has
    prefetched (`next_chunk`).  `taken` packs two counts: iterations taken from the front in its low
    half, from the back in its high half.  So one compare-and-exchange takes a chunk of either.
    """
    address = address_of(arguments, "taken")
    while True:
        taken = atomic_load(address)
        first, count = compiled_next_chunk(taken, total, run, num_threads, thread)
        more = count * (_BACK if thread % 2 else 1)
        if count == 0 or compare_exchange(address, taken, taken + more):
            return first, count


def next_chunk(taken: int, total: int, run: int, num_threads: int, thread: int) -> tuple[int, int]:
    """Return (first, count) of a thread's next chunk: even threads go forward, odd ones backward.

    Each thread continues where it stopped, so it takes what it has prefetched.  Two threads that
    took chunks from one end would now and then swap, and each would need what the other has
    prefetched: a fifth of the time of a step with one row.  Towards the middle chunks become
    smaller, so no thread waits long for the last.  With more than two threads, several share an
    end.  `total` consists of runs of `run` iterations, and a chunk lies within one run.
    """
    front, back = taken % _BACK, taken // _BACK
    left = total - front - back
    if left == 0:
        return front, 0
    # A power of two, because a product does not take an odd number of panels at a time.
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
    """Run a task on the arguments at an address; `num_threads` 0 means as many as torch uses.

    Returns when all is done.  The interpreter lock is released meanwhile.
    """
    team = team_of(num_threads or torch.get_num_threads())
    # Another engine in this process may be using the helpers.
    if team is not None and team.lock.acquire(blocking=False):
        try:
            team.run(task, arguments)
        finally:
            team.lock.release()
    else:
        native(task)(arguments, 0)


@cache
def team_of(num_threads: int) -> Team | None:
    """Return the team of `num_threads` threads, caller included; None if the caller works alone."""
    # On other systems semaphores have other names; one thread is slower, but correct.
    return Team(num_threads - 1) if num_threads > 1 and sys.platform == "linux" else None


class Team:
    """Helper threads that live as long as the process; the thread that runs a task holds `lock`."""

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

        def run_helper(thread: int) -> None:
            help_(board.ctypes.data, thread)

        for thread in range(1, num_helpers + 1):
            Thread(target=run_helper, args=(thread,), name="kernels", daemon=True).start()

    def run(self, task: Task, arguments: int) -> None:
        """Run a task on this thread and on every helper that starts in time."""
        # No helper is inside the gate, so none reads these fields now.
        self._task[0], self._arguments[0] = compiled(task).address, arguments
        self._lead(self._board, 0)


@inner
def wait_for_none(address: int, mask: int) -> None:
    """Wait until the int64 at an address has no bit of the mask."""
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
    """Open the gate, run the task, close the gate, and wait for the helpers inside."""
    gate = address_of(board, "gate")
    exchange(gate, atomic_load(gate) + _NEXT + _OPEN)
    for _ in range(exchange(address_of(board, "sleepers"), 0)):
        _sem_post(address_of(board, "semaphore"))
    call(board.task, board.arguments, thread)
    fetch_add(gate, -_OPEN)
    wait_for_none(gate, _INSIDE)


def _help(board: _Board, thread: int) -> None:
    """Run each new task whose gate is open; never return."""
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
            # Count as a sleeper first, then check again: the leader opens the gate first, then
            # wakes sleepers.  A wake-up that comes too late only ends the next sleep early.
            fetch_add(address_of(board, "sleepers"), 1)
            state = atomic_load(gate)
            if not (state & _OPEN and state // _NEXT != seen):
                _sem_wait(address_of(board, "semaphore"))
            waited = 0
