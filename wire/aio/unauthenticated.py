"""A bound on the connections of a bound socket that have not authenticated.

libzmq reads the first message of a connection whole, up to the port's largest message, before it
looks whether it is a handshake, so many unauthenticated connections could take any amount of
memory. A peer with a key authenticates within milliseconds; over the bound the oldest connections
are cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

# Also the number of workers that may connect at once: those that are cut try again.
MAX_UNAUTHENTICATED: Final = 128


class UnauthenticatedConnections:
    """The unauthenticated connections of one bound socket, by file descriptor.

    `read_events` must call `add`, `drop_oldest` and `remove` for every pending event of the socket:
    descriptors are reused, and `cut` may only end connections of this socket.
    """

    def __init__(self, read_events: Callable[[], None], cut: Callable[[int], None]) -> None:
        self._read_events = read_events
        self._cut = cut
        self._waiting: dict[int, None] = {}  # a dict for its order

    def add(self, fd: int) -> None:
        """A connection was accepted."""
        self._waiting[fd] = None
        if len(self._waiting) == MAX_UNAUTHENTICATED + 1:
            asyncio.get_running_loop().call_soon(self._make_room)

    def drop_oldest(self) -> None:
        """One connection authenticated.  libzmq does not say which; the oldest is assumed.

        So each authenticated peer may spare one other connection, which libzmq ends after the 5 s
        of a handshake.
        """
        if self._waiting:
            del self._waiting[next(iter(self._waiting))]

    def remove(self, fd: int) -> None:
        """A connection sent its first message, or ended."""
        self._waiting.pop(fd, None)

    def _make_room(self) -> None:
        self._read_events()
        while len(self._waiting) > MAX_UNAUTHENTICATED:
            fd = next(iter(self._waiting))
            del self._waiting[fd]
            self._cut(fd)
