"""Run the reads and writes of one ZeroMQ socket and its monitor on the event loop.

The file descriptor of a ZeroMQ socket is edge-triggered, and any call on the socket may consume the
notification.  So `_turn`, the callback of the event loop, reads until the socket is empty or the
burst limit is reached, sends queued messages, and then checks the socket again.  Code that uses the
socket outside this callback must call `wake`.

Monitor events are read at once, but handled only after all earlier messages have been delivered, so
that a peer's last message is delivered before its loss is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, Protocol

import structlog

# Limits for one callback, so that timers and other sockets are not delayed: messages and bytes ...
MAX_BURST: Final = 256
MAX_BURST_BYTES: Final = 16 << 20
# ... and time, because some messages take long to handle.
MAX_BURST_S: Final = 0.005

_LOG = structlog.get_logger(__name__)
_P = ParamSpec("_P")


def guarded(handler: Callable[_P, None] | None) -> Callable[_P, None]:
    """Wrap `handler` so that its exceptions are logged and do not stop the socket."""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if handler is None:
            return
        try:
            handler(*args, **kwargs)
        except Exception:
            _LOG.exception("handler failed", handler=getattr(handler, "__qualname__", handler))

    return call


class Port(Protocol):
    """A ZeroMQ socket with its monitor: `wire.aio.port.Port`."""

    @property
    def fds(self) -> tuple[int, int]: ...

    def is_readable(self) -> bool: ...

    def events(self) -> list[tuple[int, int]]:
        """Return the monitor events since the last call, as (kind, file descriptor)."""

    async def close(self, linger_s: float) -> None: ...


class Pump:
    """Runs one socket on the current event loop from construction until `close`.

    Args:
        port: The socket.
        receive: Reads and delivers one message; returns its size in bytes, None if there is none.
        notice: Records a monitor event (kind, file descriptor).
        settle: Handles the recorded events, after all messages before them were delivered.
        flush: Sends queued messages; returns the seconds until the next flush, None if all are
            sent.
        max_burst_s: How long one callback may read, in seconds.
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
        # A monitor's file descriptor becomes readable only after a first read has found it empty.
        self._loop.call_soon(self._on_monitor)

    def wake(self) -> None:
        """Schedule reading and flushing, after the socket was used elsewhere."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def read_events(self) -> None:
        """Record all monitor events so far."""
        for event in self._port.events():
            self._notice(event)

    async def close(self, linger_s: float) -> None:
        """Flush queued messages for up to `linger_s`, then close; libzmq lingers for the rest."""
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
        """Read messages, handle events and flush; schedule another call if work is left."""
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
            return  # nothing is queued, and the socket was not used since it was found empty
        pause_s = self._flush()
        is_waiting = pause_s is not None
        is_readable = self._port.is_readable()
        if is_waiting:  # `is_readable` may have consumed the notification of a writable peer
            pause_s = self._flush()
        if pause_s is not None and self._retry is None:
            self._retry = self._loop.call_later(pause_s, self._on_retry)
        if not is_drained or is_readable or (is_waiting and pause_s is None):
            self.wake()

    def _drain(self) -> bool:
        num_bytes, end = 0, self._loop.time() + self._max_burst_s
        for _ in range(MAX_BURST):
            # Checking first is cheaper than the exception that a read of an empty socket raises.
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
