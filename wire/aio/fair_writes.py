"""Fair writes: each connection with pending data writes once per iteration of the event loop.

All data that a connection gets in one iteration is sent in one write, because system calls are the
largest part of a token's cost.  With very many writers, an iteration serves the first quarter of
them, so that reading is not delayed by thousands of writes in a row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from itertools import islice
from typing import Final, Protocol

# An iteration serves a quarter of the writers, but at least this many, which takes 0.7 ms.
MIN_WRITERS: Final = 128


class Writer(Protocol):
    """The writer of one connection.  Its methods must not raise."""

    def prepare(self, now: float, /) -> bytes:
        """Encode all pending data; `now` is the same for all writers of an iteration."""

    def transmit(self, body: bytes, /) -> None:
        """Send the bytes that `prepare` returned.  Not called if they are empty."""


class FairWrites:
    """Schedules writers to write at the end of an iteration of the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[Writer, None] = {}

    def take(self, writer: Writer) -> None:
        """Schedule the writer's `prepare` and `transmit` for the end of this iteration."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due[writer] = None

    def _run(self) -> None:
        due = self._next()
        # First prepare all, then send all: a reader on another core then finds more data at a time,
        # instead of sleeping and waking for each write.
        now = self._clock()
        bodies = [writer.prepare(now) for writer in due]
        for writer, body in zip(due, bodies, strict=True):
            if body:
                writer.transmit(body)

    def _next(self) -> Collection[Writer]:
        """Return the writers of this iteration; the others stay queued for the next one."""
        num = max(MIN_WRITERS, len(self._due) // 4)
        if num >= len(self._due):
            due, self._due = self._due, {}
            return due
        first = list(islice(self._due, num))
        for writer in first:
            del self._due[writer]
        asyncio.get_running_loop().call_soon(self._run)
        return first
