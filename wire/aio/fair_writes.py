"""Turns: everybody who has something to write, once in a turn of the event loop.

What came for a connection in one turn leaves in one write: writes are the largest part of what a
token costs.  And who reads it, on another core, is woken once for all that is there.

Where very many have something to write, they divide into a few turns, in the order in which they
asked.  With nothing else to do these follow each other at once.  With more to read than can be
written, they alternate with reading: nobody waits for thousands of writes in a row, and what each
of them writes has grown meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from itertools import islice
from typing import Final, Protocol

# A turn is for a quarter of those that wait, and for no fewer than so many: 0.7 ms of writing.
MIN_WRITERS: Final = 128


class Writer(Protocol):
    """Somebody who writes to one connection.  Neither method may raise."""

    def prepare(self, now: float, /) -> bytes:
        """Take what has come, and return what is to be sent of it; `now` is the same for all."""

    def transmit(self, body: bytes, /) -> None:
        """Send that; called if there is any."""


class Turns:
    """Gives each writer that asked for it a turn, after what else is to be done now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[Writer, None] = {}

    def take(self, writer: Writer) -> None:
        """Have the writer `prepare`, then `transmit` if there is anything, when this turn ends."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due[writer] = None

    def _run(self) -> None:
        due = self._next()
        # First all of the work, then all of the sending: who reads what is sent, on another core,
        # then has more to read when it is done, and need not sleep and be woken for each.
        now = self._clock()
        bodies = [writer.prepare(now) for writer in due]
        for writer, body in zip(due, bodies, strict=True):
            if body:
                writer.transmit(body)

    def _next(self) -> Collection[Writer]:
        """Return whose turn it is now; the others keep their place for the next one."""
        num = max(MIN_WRITERS, len(self._due) // 4)
        if num >= len(self._due):
            due, self._due = self._due, {}
            return due
        first = list(islice(self._due, num))
        for writer in first:
            del self._due[writer]
        asyncio.get_running_loop().call_soon(self._run)
        return first
