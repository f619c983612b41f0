"""Fair writes: each connection with pending data writes once in an iteration of the event loop.

Data for a connection in one iteration leaves in one write, because writes are the largest part of a
token's cost.  With very many writers an iteration serves a quarter of them, in the order in which
they asked, so that reading does not wait for thousands of writes in a row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from itertools import islice
from typing import Final, Protocol

# An iteration serves a quarter of the writers, but at least this many: 0.7 ms of writing.
MIN_WRITERS: Final = 128


class Writer(Protocol):
    """A writer of one connection.  Neither method may raise."""

    def prepare(self, now: float, /) -> bytes:
        """Return the bytes to send of all pending data; `now` is the same for all writers."""

    def transmit(self, body: bytes, /) -> None:
        """Send the bytes that `prepare` returned, if there were any."""


class FairWrites:
    """Schedules writers: each one that asked writes after the other work of this iteration."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[Writer, None] = {}

    def take(self, writer: Writer) -> None:
        """Call the writer's `prepare` and `transmit` at the end of this iteration."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due[writer] = None

    def _run(self) -> None:
        due = self._next()
        # First prepare all, then send all: a reader on another core then finds more to read and
        # is not put to sleep and woken for each write.
        now = self._clock()
        bodies = [writer.prepare(now) for writer in due]
        for writer, body in zip(due, bodies, strict=True):
            if body:
                writer.transmit(body)

    def _next(self) -> Collection[Writer]:
        """Return the writers of this iteration; the others keep their order for the next one."""
        num = max(MIN_WRITERS, len(self._due) // 4)
        if num >= len(self._due):
            due, self._due = self._due, {}
            return due
        first = list(islice(self._due, num))
        for writer in first:
            del self._due[writer]
        asyncio.get_running_loop().call_soon(self._run)
        return first
