"""TLS that is read in small portions, so that no client can hold up the loop with its records.

A record may cost far more than its bytes: a KeyUpdate of TLS 1.3 has 27, and takes 24 us and a
reply.  uvloop reads 256 KiB at a time, and as long as that fills, 32 times in a turn: one client
without any key stopped the loop for seven seconds at once, again and again.  So a portion that was
dear is followed by the least one, and doubles while it is cheap: of such a client a turn takes some
ten milliseconds.  The time limits for handshakes, requests and silence do the rest.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import ssl
import time
from collections.abc import Callable
from typing import Any, Final, cast

import uvloop
import uvloop.loop

# A whole record, of 16 KiB, is read in some 25 us, and a request may take a millisecond.
LEAST_BYTES: Final = 256
MOST_BYTES: Final = 16 << 10
CHEAP_S: Final = 0.00025


class Portions(asyncio.BufferedProtocol):
    """Passes on to TLS what the loop says and reads."""

    def __init__(
        self, sealed: asyncio.BufferedProtocol, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sealed = sealed
        self._clock = clock
        self._num_bytes = LEAST_BYTES

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(cast(bytearray, self._sealed.get_buffer(sizehint)))[: self._num_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        began_at = self._clock()
        self._sealed.buffer_updated(nbytes)
        is_cheap = self._clock() - began_at <= CHEAP_S
        self._num_bytes = min(2 * self._num_bytes, MOST_BYTES) if is_cheap else LEAST_BYTES

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._sealed.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._sealed.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._sealed.eof_received()

    def pause_writing(self) -> None:
        self._sealed.pause_writing()

    def resume_writing(self) -> None:
        self._sealed.resume_writing()


def sealed_protocol(
    protocol: asyncio.Protocol,
    tls: ssl.SSLContext,
    handshake_s: float,
    shaken: asyncio.Future[None],
) -> Portions:
    """Return the protocol of a connection that speaks TLS, for who is at its end.

    `shaken` is done when the handshake is over, or has the error that ended it.
    """
    loop = asyncio.get_running_loop()
    make: Any = asyncio.sslproto.SSLProtocol
    if isinstance(loop, uvloop.Loop):
        make = uvloop.loop.SSLProtocol  # type: ignore[attr-defined]
    return Portions(
        make(loop, protocol, tls, shaken, server_side=True, ssl_handshake_timeout=handshake_s)
    )
