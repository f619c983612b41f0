"""Reads and sends on one ZeroMQ socket in iterations of the event loop, and reads its monitor.

The file descriptor of such a socket is edge-triggered, and any use of the socket may swallow an
edge.  So a turn reads until the socket is empty or the burst is over, sends queued messages, then
checks the socket again; code that uses the socket outside of a turn calls `wake`.

A monitor event is noticed at once, but acted on after all earlier messages have been delivered: a
peer's last message precedes its loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, Protocol

import structlog

# One turn reads at most this much, so that timers and other sockets get theirs.
MAX_BURST: Final = 256
MAX_BURST_BYTES: Final = 16 << 20
# A peer may say what takes long to read: after this much time the turn is over too.
MAX_BURST_S: Final = 0.005

_LOG = structlog.get_logger(__name__)
_P = ParamSpec("_P")


def guarded(handler: Callable[_P, None] | None) -> Callable[_P, None]:
    """Return `handler` with its exceptions logged: a bug in one must not stop the socket."""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if handler is None:
            return
        try:
            handler(*args, **kwargs)
        except Exception:
            _LOG.exception("handler failed", handler=getattr(handler, "__qualname__", handler))

    return call


class Port(Protocol):
    """A socket with its monitor."""

    @property
    def fds(self) -> tuple[int, int]: ...

    def is_readable(self) -> bool: ...

    def events(self) -> list[tuple[int, int]]:
        """Return the monitor events (kind, file descriptor) since the last call."""

    async def close(self, linger_s: float) -> None: ...


class Pump:
    """Runs one socket on the running loop from construction to `close`.

    Args:
        port: The socket.
        receive: Reads and delivers one message; returns its bytes, None if there is none.
        notice: Takes a monitor event (kind, file descriptor).
        settle: Acts on the events noticed: all that came before them has been delivered.
        flush: Sends what waits; returns in how many seconds to go on, None if all is sent.
        max_burst_s: A turn that has read for so long is over.
    """

    def __init__(
        self,
        port: Port,
        receive: Callable[[], int | None],
        notice: Callable[[tuple[int, int]], None],
        settle: Callable[[], None],
        flush: Callable[[], float | None],
        max_burst_s: float = MAX_BURST_S,
    ) -> None:
        self.is_closed = False
        self._max_burst_s = max_burst_s
        self._port = port
        self._receive, self._notice, self._settle, self._flush = receive, notice, settle, flush
        self._is_scheduled = False
        self._retry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._socket_fd, self._monitor_fd = port.fds
        self._loop.add_reader(self._socket_fd, self._turn)
        self._loop.add_reader(self._monitor_fd, self._on_monitor)
        # A monitor signals its descriptor only after a first read found it empty.
        self._loop.call_soon(self._on_monitor)

    def wake(self) -> None:
        """Schedule a turn."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def read_events(self) -> None:
        """Notice every monitor event that has happened until now."""
        for event in self._port.events():
            self._notice(event)

    async def close(self, linger_s: float) -> None:
        """Send queued messages for up to `linger_s`; the socket lingers for what is left."""
        deadline = self._loop.time() + linger_s
        while not self.is_closed and self._loop.time() < deadline:
            pause_s = self._flush()
            if pause_s is None:
                break
            await asyncio.sleep(pause_s)
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket_fd)
        self._loop.remove_reader(self._monitor_fd)
        if self._retry is not None:
            self._retry.cancel()
        await self._port.close(max(0.0, deadline - self._loop.time()))

    def _turn(self) -> None:
        is_quiet = not self._is_scheduled and self._retry is None
        self._is_scheduled = False
        if self.is_closed:
            return
        is_drained = self._drain()
        if is_drained:
            self._settle()
        if self.is_closed:  # by a handler
            return
        if is_quiet and is_drained and not self._is_scheduled:
            return  # nothing waits, and nobody has used the socket since it was asked
        pause_s = self._flush()
        is_waiting = pause_s is not None
        is_readable = self._port.is_readable()
        if is_waiting:  # The question may have swallowed the news that a full peer has room again.
            pause_s = self._flush()
        if pause_s is not None and self._retry is None:
            self._retry = self._loop.call_later(pause_s, self._on_retry)
        if not is_drained or is_readable or (is_waiting and pause_s is None):
            self.wake()

    def _drain(self) -> bool:
        num_bytes, end = 0, self._loop.time() + self._max_burst_s
        for _ in range(MAX_BURST):
            # To be told that there is nothing costs less than to try, and have it raised.
            if not self._port.is_readable() or (read_bytes := self._receive()) is None:
                return True
            num_bytes += read_bytes
            if num_bytes > MAX_BURST_BYTES or self.is_closed or self._loop.time() >= end:
                return False
        return False

    def _on_monitor(self) -> None:
        if not self.is_closed:
            self.read_events()
            self.wake()

    def _on_retry(self) -> None:
        self._retry = None
        self._is_scheduled = True
        self._turn()
