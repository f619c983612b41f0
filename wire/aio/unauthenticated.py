"""Strangers: connections of a bound socket that have not shown who they are, and a bound on them.

libzmq reads what comes first on a connection whole, up to the largest message that the port takes,
before it looks whether that is a handshake: many strangers could take any amount of memory.  Who
has a key is known within milliseconds, so of too many those that came first are cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

# Also how many workers may come at once: those that were cut try again.
MAX_STRANGERS: Final = 128


class Strangers:
    """Connections by file descriptor, of one bound socket.  `cut` ends one.

    `read_events` must call `come`, `succeed` and `leave` for all that has happened: descriptors are
    used again, and only connections of this socket may be cut.
    """

    def __init__(self, read_events: Callable[[], None], cut: Callable[[int], None]) -> None:
        self._read_events = read_events
        self._cut = cut
        self._waiting: dict[int, None] = {}  # a dict for its order

    def come(self, fd: int) -> None:
        """A connection was accepted."""
        self._waiting[fd] = None
        if len(self._waiting) == MAX_STRANGERS + 1:
            asyncio.get_running_loop().call_soon(self._make_room)

    def succeed(self) -> None:
        """One of them is known now.  libzmq does not say which: taken for it is who came first.

        That lets off as many strangers as there are others with a key, and libzmq ends them after
        the 5 s of a handshake.
        """
        if self._waiting:
            del self._waiting[next(iter(self._waiting))]

    def leave(self, fd: int) -> None:
        """It is known by its first message, or has ended."""
        self._waiting.pop(fd, None)

    def _make_room(self) -> None:
        self._read_events()
        while len(self._waiting) > MAX_STRANGERS:
            fd = next(iter(self._waiting))
            del self._waiting[fd]
            self._cut(fd)
