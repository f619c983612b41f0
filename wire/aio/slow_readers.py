"""Detect and disconnect clients that read their responses too slowly.

A full write buffer does not tell how slow a client is: the kernel accepts more data only when a
third of its own buffer is free, which can take a minute on a slow network.  So the bytes that the
client's TCP has acknowledged are measured.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from typing import Final

# The minimum rate of a client with too many pending bytes, and the period of its measurement.  Any
# network is faster, but a client that reads a byte now and then cannot block our memory.  The
# kernel of a slow client sends ACKs in steps, such as every 13 s at 10 kB/s.
MIN_BYTES_PER_S: Final = 4 << 10
STALL_S: Final = 30.0
# tcpi_bytes_acked, a u64 at offset 120 of Linux's `struct tcp_info`, to which fields are only ever
# appended.
_INFO_BYTES: Final = 128
_ACKED_AT: Final = 120
# The poll event of Linux for a half-closed connection.  Other systems only report a reset.
_HUNG_UP: Final = getattr(select, "POLLRDHUP", 0)
# SO_LINGER for 0 s, which makes close reset the connection.
_RESET: Final = struct.pack("ii", 1, 0)


class SlowReader:
    """Monitors how fast one client reads, while too many bytes are pending or during close.

    If the client reads less than `MIN_BYTES_PER_S` over `stall_s`, its connection is reset and
    `on_cut` is called.
    """

    __slots__ = (
        "_hang_up_s",
        "_is_over",
        "_on_cut",
        "_stall_s",
        "_taken_bytes",
        "_timer",
        "_transport",
    )

    def __init__(
        self, transport: asyncio.Transport, stall_s: float, on_cut: Callable[[], object]
    ) -> None:
        self._transport = transport
        self._stall_s = stall_s
        self._on_cut = on_cut
        self._timer: asyncio.TimerHandle | None = None
        # Set by `hang_up`: how long the client may keep the connection open after the last byte.
        self._hang_up_s: float | None = None
        self._taken_bytes = 0
        self._is_over = False

    @property
    def is_sealed(self) -> bool:
        """Whether the connection uses TLS."""
        return self._transport.get_extra_info("sslcontext") is not None

    def watch(self) -> None:
        """Start measuring, because more bytes are pending than the limit."""
        if self._timer is None:
            self._arm()

    def relax(self) -> None:
        """Stop measuring, because the client has caught up."""
        if self._hang_up_s is None:
            self._disarm()

    def hang_up(self, after_s: float) -> None:
        """Let the client read all pending bytes, wait `after_s` for it to close, then abort."""
        if self._is_over:
            return
        # With TLS, pending bytes may be in the underlying transport's buffer, whose size is hidden.
        self._hang_up_s = self._stall_s if self.is_sealed else after_s
        self._disarm()
        self._arm()

    def cut(self) -> None:
        """Reset the connection, so that the kernel discards pending bytes too."""
        if self._is_over:
            return
        on_cut = self._on_cut
        self.forget()
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        on_cut()
        self._transport.abort()

    def forget(self) -> None:
        """Stop for good, because the connection is closed."""
        self._is_over = True
        self._on_cut = _nothing  # breaks a reference cycle
        self._disarm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._taken_bytes = _taken_bytes(self._transport)
        loop = asyncio.get_running_loop()
        if self._hang_up_s is None or self._transport.get_write_buffer_size():
            self._timer = loop.call_later(self._stall_s, self._look)
        else:
            self._timer = loop.call_later(self._hang_up_s, self._end, self._hang_up_s)

    def _look(self) -> None:
        if self._is_read(self._stall_s) or not self._transport.get_write_buffer_size():
            self._arm()
        else:
            self.cut()

    def _end(self, waited_s: float) -> None:
        if self._is_read(waited_s):
            self._arm()
        else:
            self._transport.abort()

    def _is_read(self, waited_s: float) -> bool:
        taken_bytes = _taken_bytes(self._transport) - self._taken_bytes
        return taken_bytes >= MIN_BYTES_PER_S * waited_s


def _nothing() -> None:
    """Do nothing; replaces `on_cut` after the end."""


def has_left(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its sending side, even if there are unread bytes before EOF."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _HUNG_UP)
    return bool(poll.poll(0))


def _taken_bytes(transport: asyncio.Transport) -> int:
    """Return a number that grows with each byte acknowledged by the client's TCP."""
    acked = 0
    if hasattr(socket, "TCP_INFO"):
        sock = transport.get_extra_info("socket")
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        acked = int.from_bytes(info[_ACKED_AT:_INFO_BYTES], "little")
    # Only Linux reports ACKs; elsewhere use how far our own write buffer has shrunk.
    return acked or -transport.get_write_buffer_size()
