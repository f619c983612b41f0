"""Turns: everybody who has something to write, once in a turn of the event loop.

What came for a connection in one turn leaves in one write: writes are the largest part of what a
token costs.  And who reads it, on another core, is woken once for all that is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


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
        due, self._due = self._due, {}
        # First all of the work, then all of the sending: who reads what is sent, on another core,
        # then has more to read when it is done, and need not sleep and be woken for each.
        now = self._clock()
        bodies = [writer.prepare(now) for writer in due]
        for writer, body in zip(due, bodies, strict=True):
            if body:
                writer.transmit(body)
