"""The bodies of HTTP requests, which must be plain JSON, small enough and fast enough.

Each is bounded, and so are all together that are being read or understood: a body more than fits is
refused and not waited for, since who waits may do so on purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from router.http import asgi
from router.http.asgi import MAX_BODY_BYTES, HttpError
from router.http.exchange import HttpExchange
from router.http.writer import Disconnected
from wire.errors import ErrorCode, WireError

# A body must come at this rate at least, after a grace; slower is an attack or a broken link.
BODY_BYTES_PER_S: Final = 64 * 1024
# Of all bodies that are being read or understood.
MAX_TOTAL_BYTES: Final = 256 * 1024 * 1024
CLOSE: Final = (b"connection", b"close")


class Bodies:
    """Reads bodies: each of `max_bytes`, its first byte within `grace_s`, then at a pace."""

    def __init__(
        self,
        max_bytes: int = MAX_BODY_BYTES,
        grace_s: float = 5.0,
        *,
        bytes_per_s: int = BODY_BYTES_PER_S,
        max_total_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        self._max_bytes = max_bytes
        self._grace_s = grace_s
        self._bytes_per_s = bytes_per_s
        self._max_total_bytes = max_total_bytes
        self._total_bytes = 0

    @asynccontextmanager
    async def of(self, exchange: HttpExchange) -> AsyncIterator[bytes]:
        """The body of a request; its bytes count until the block ends.

        Raises:
            HttpError: 408, 413 or 415.
            WireError: OVERLOADED; there are too many at a time.
            Disconnected: The client left before its end.
        """
        asgi.check_content_type(exchange.scope)
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            self._total_bytes += size - held
            held = size
            if self._total_bytes > self._max_total_bytes:
                raise WireError(ErrorCode.OVERLOADED, "too many large bodies at a time")

        try:
            raw = await self._whole(exchange, hold)
            exchange.is_body_read = True
            yield raw
        finally:
            self._total_bytes -= held

    async def _whole(self, exchange: HttpExchange, hold: asgi.OnBytes) -> bytes:
        begin = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._grace_s) as timer:

                def on_bytes(size: int) -> None:
                    # The deadline moves with what has come: a body that trickles ends soon,
                    # whatever its size is said to be.
                    timer.reschedule(begin + self._grace_s + size / self._bytes_per_s)
                    hold(size)

                raw = await asgi.read_body(
                    exchange.scope, exchange.receive, self._max_bytes, on_bytes
                )
        except TimeoutError:
            raise HttpError(
                408, "the body came too slowly", code="body_timeout", headers=(CLOSE,)
            ) from None
        if raw is None:
            raise Disconnected
        return raw
