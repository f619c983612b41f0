"""Limit the number of unauthenticated connections of a bound socket.

libzmq buffers the whole first message of a connection, up to the maximum message size, before it
checks whether the message is a handshake.  So many unauthenticated connections could use any amount
of memory.  A peer with a key authenticates within milliseconds, so above the limit the oldest
unauthenticated connections are closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

# This also limits how many workers can connect at once; those that are disconnected retry.
MAX_UNAUTHENTICATED: Final = 128


class UnauthenticatedConnections:
    """The unauthenticated connections of one bound socket, by file descriptor.

    Descriptors are reused, and `cut` must not close the connections of other sockets.  Therefore
    `read_events` must process all pending events of the socket, that is, call `add`, `drop_oldest`
    and `remove` for them.
    """

    def __init__(self, read_events: Callable[[], None], cut: Callable[[int], None]) -> None:
        self._read_events = read_events
        self._cut = cut
        self._waiting: dict[int, None] = {}  # a dict for its order

    def add(self, fd: int) -> None:
        """Record an accepted connection."""
        self._waiting[fd] = None
        if len(self._waiting) == MAX_UNAUTHENTICATED + 1:
            asyncio.get_running_loop().call_soon(self._make_room)

    def drop_oldest(self) -> None:
        """Record that a connection has authenticated, assuming that it is the oldest one.

        libzmq does not report which one it was.  If the assumption is wrong, another connection
        is not counted, and libzmq closes it after the handshake timeout of 5 s.
        """
        if self._waiting:
            del self._waiting[next(iter(self._waiting))]

    def remove(self, fd: int) -> None:
        """Record that a connection has sent its first message or ended."""
        self._waiting.pop(fd, None)

    def _make_room(self) -> None:
        self._read_events()
        while len(self._waiting) > MAX_UNAUTHENTICATED:
            fd = next(iter(self._waiting))
            del self._waiting[fd]
            self._cut(fd)
