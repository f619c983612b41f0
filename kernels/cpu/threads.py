"""Compiled loops on several threads.

A task is a native function of an address, that of an int64 array, and the number of the thread it
runs on, 0 for the caller.  Word 0 is the address of a counter (word 1, from 0) from which the
threads take their shares until it reaches the end; the words from 2 are the task's own.

The caller works too and waits for no one who has not begun: a helper that the system runs late, on
cores that others want as well, finds the gate closed and costs nothing.  OpenMP's teams (torch's)
wait for every member at every end instead; with a second worker on the same two cores that is a
time slice each, two hundred times a step.  A helper without work looks for some for about 100 us
and then sleeps.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import numba
import numpy as np
import torch
from numba import cfunc, njit, types

from kernels.cpu.intrinsics import call, exchange, fetch_add, pause, read, replaced

TASK = types.void(types.CPointer(types.int64), types.int64)
# A product and a sum may be rounded once, sums reordered.
FASTMATH = {"contract", "reassoc", "nsz"}
# Division as NumPy has it: a check for zero in a loop keeps it from being vectorized.
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}
# A part of a task, compiled into it.
inner = njit(**_OPTIONS)
# One that compares, over numbers: a maximum is vectorized only if it may forget about NaN.
comparing = njit(**{**_OPTIONS, "fastmath": FASTMATH | {"nnan"}})

# The gate is one word: helpers inside, whether it is open, and the number of the task.
_OPEN, _INSIDE, _NEXT = 1 << 16, (1 << 16) - 1, 1 << 17
# Bytes of a board: the gate; the task and its argument; how many sleep, on which semaphore.
_GATE, _FUNCTION, _ARGUMENT, _SLEEPERS, _SEMAPHORE, _BOARD_WORDS = 0, 64, 72, 128, 192, 32
# Looks at a word, some 25 ns each, before a thread lets others have its core.
PATIENCE = 4000

_COMPILING = Lock()
_sem_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


def compiled(function: Callable[..., None]) -> Any:
    """Compile a task: a module's function over its globals, or the cache on disk never hits."""
    with _COMPILING:
        usual = numba.config.CACHE_DIR
        try:
            numba.config.CACHE_DIR = str(_cache_directory())
            return cfunc(TASK, nopython=True, cache=True, **_OPTIONS)(function)
        except (OSError, RuntimeError):  # nowhere to keep it
            return cfunc(TASK, nopython=True, **_OPTIONS)(function)
        finally:
            numba.config.CACHE_DIR = usual


@cache
def _cache_directory() -> Path:
    # Numba looks at one file's date; a task is made of several.
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "baton" / "kernels" / digest[:16]


def run(task: Any, argument: int, num_threads: int = 0) -> None:
    """Run a task on the words at an address; `num_threads` 0 is as many as torch uses.

    Returns when every share is done.  The interpreter lock is released meanwhile.
    """
    team = team_of(num_threads or torch.get_num_threads())
    # Another engine of this process may be using the helpers.
    if team is not None and team.lock.acquire(blocking=False):
        try:
            team.run(task, argument)
        finally:
            team.lock.release()
    else:
        _native(task)(argument, 0)


@cache
def team_of(num_threads: int) -> Team | None:
    """Return the helpers for so many threads in all; None where the caller works alone."""
    # Elsewhere semaphores have other names; one thread is slower, not wrong.
    return Team(num_threads - 1) if num_threads > 1 and sys.platform == "linux" else None


class Team:
    """Helper threads that live as long as the process; `lock` is held by whoever runs a task."""

    def __init__(self, num_helpers: int) -> None:
        self.lock = Lock()
        self._board = np.zeros(_BOARD_WORDS, np.int64)
        board = self._board.ctypes.data
        ctypes.CDLL(None).sem_init(ctypes.c_void_p(board + _SEMAPHORE), 0, 0)
        self._lead = _native(_lead_task())
        self._words = array("q", [board, 0, 0])
        helper = array("q", [board])
        help_ = _native(_help_task())

        def live(thread: int) -> None:
            help_(helper.buffer_info()[0], thread)

        for thread in range(1, num_helpers + 1):
            Thread(target=live, args=(thread,), name="kernels", daemon=True).start()

    def run(self, task: Any, argument: int) -> None:
        """Run a task here and on every helper that comes in time."""
        self._words[1], self._words[2] = task.address, argument
        self._lead(self._words.buffer_info()[0], 0)


@inner
def wait_for_none(address, mask):  # type: ignore[no-untyped-def]
    """Wait until no bit of the mask is set in the int64 at an address."""
    waited = 0
    while read(address) & mask:
        pause()
        waited += 1
        if waited > PATIENCE:
            _sched_yield()


@cache
def _native(task: Any) -> Callable[[int, int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(task.address)


@cache
def _lead_task() -> Any:
    return compiled(_lead)


@cache
def _help_task() -> Any:
    return compiled(_help)


def _lead(words, thread):  # type: ignore[no-untyped-def]
    """Open the gate, work, close it, wait for those inside."""
    board, function, argument = words[0], words[1], words[2]
    gate = read(board + _GATE)
    exchange(board + _FUNCTION, function)
    exchange(board + _ARGUMENT, argument)
    exchange(board + _GATE, gate + _NEXT + _OPEN)
    for _ in range(exchange(board + _SLEEPERS, 0)):
        _sem_post(board + _SEMAPHORE)
    call(function, argument, thread)
    fetch_add(board + _GATE, -_OPEN)
    wait_for_none(board + _GATE, _INSIDE)


def _help(words, thread):  # type: ignore[no-untyped-def]
    """Enter whenever the gate is open for a task not seen yet; for ever."""
    board = words[0]
    seen, waited = 0, 0
    while True:
        gate = read(board + _GATE)
        if gate & _OPEN and gate // _NEXT != seen:
            if replaced(board + _GATE, gate, gate + 1):
                call(read(board + _FUNCTION), read(board + _ARGUMENT), thread)
                fetch_add(board + _GATE, -1)
                seen = gate // _NEXT
                waited = 0
        elif waited < PATIENCE:
            waited += 1
            pause()
        else:
            # Announced first, then looked again: the leader opens first, then wakes.  A wake-up
            # that comes too late ends the next sleep early, no more.
            fetch_add(board + _SLEEPERS, 1)
            gate = read(board + _GATE)
            if not (gate & _OPEN and gate // _NEXT != seen):
                _sem_wait(board + _SEMAPHORE)
            waited = 0
