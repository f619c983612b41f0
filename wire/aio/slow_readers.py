"""Outgoing bytes of one client, and the rule that cuts off a client that reads too slowly.

A full write buffer does not show how slow a client is: the kernel takes more only when a third of
its own buffer is free, a minute's worth on a slow network.  So acknowledged bytes are measured.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from typing import Final

# The least rate of a client with too many pending bytes, and the time it is measured over.  Any
# network is faster; a client that reads a byte now and then cannot hold our memory.  The kernel of
# a slow client acknowledges in steps: every 13 s at 10 kB/s.
MIN_BYTES_PER_S: Final = 4 << 10
STALL_S: Final = 30.0
# In Linux's `struct tcp_info`, which is only ever added to: tcpi_bytes_acked, a u64 at 120.
_INFO_BYTES: Final = 128
_ACKED_AT: Final = 120
# What Linux says of a client that has ended its side; other systems tell of a reset alone.
_HUNG_UP: Final = getattr(select, "POLLRDHUP", 0)
# SO_LINGER on, for 0 s: closing resets.
_RESET: Final = struct.pack("ii", 1, 0)


class SlowReader:
    """Watches one connection while more than its limit is pending, and when it ends.

    Below `MIN_BYTES_PER_S` over `stall_s` the client is cut off, and `on_cut` is called.
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
        # Set after our last byte: how long the client may keep the connection open.
        self._hang_up_s: float | None = None
        self._taken_bytes = 0
        self._is_over = False

    @property
    def is_sealed(self) -> bool:
        """Whether it is TLS."""
        return self._transport.get_extra_info("sslcontext") is not None

    def watch(self) -> None:
        """Start measuring: more bytes are pending than the limit."""
        if self._timer is None:
            self._arm()

    def relax(self) -> None:
        """Stop measuring: the client has caught up."""
        if self._hang_up_s is None:
            self._disarm()

    def hang_up(self, after_s: float) -> None:
        """Close gracefully: once all is read, the client has `after_s` to close; then abort."""
        if self._is_over:
            return
        # Over TLS pending bytes are in the buffer of the transport below, which cannot be seen.
        self._hang_up_s = self._stall_s if self.is_sealed else after_s
        self._disarm()
        self._arm()

    def cut(self) -> None:
        """Reset the connection, so that the kernel drops pending bytes too."""
        if self._is_over:
            return
        on_cut = self._on_cut
        self.forget()
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        on_cut()
        self._transport.abort()

    def forget(self) -> None:
        """The connection is gone."""
        self._is_over = True
        self._on_cut = _nothing  # no circle is left for the garbage collector
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
    """Do nothing: the default of `on_cut`."""


def has_left(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its sending side, even if unread bytes precede that."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _HUNG_UP)
    return bool(poll.poll(0))


def _taken_bytes(transport: asyncio.Transport) -> int:
    """Return a number that grows with each byte that the client acknowledges."""
    acked = 0
    if hasattr(socket, "TCP_INFO"):
        sock = transport.get_extra_info("socket")
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        acked = int.from_bytes(info[_ACKED_AT:_INFO_BYTES], "little")
    # Only Linux tells; elsewhere our own buffer is the measure.
    return acked or -transport.get_write_buffer_size()
