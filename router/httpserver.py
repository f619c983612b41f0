"""The HTTP server: uvicorn on our loop, with the limits that it has not.

uvicorn knows no time limit before a request is complete, no limit of its headers, no cap that
answers as an API should.  `GuardedProtocol` adds them around its protocol:

    headers     complete `grace_s` after the connection began or the last answer's next byte came,
                within MAX_HEADER_BYTES
    bodies      the gateway's business, which reads them; what comes after the answer is not read
    answers     a client that does not take the end of one is cut off
    connections `max_connections`; one more gets 503 and Retry-After; as many TLS handshakes
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.http import HttpError, retry_after
from wire.aio.listener import bind, listen
from wire.errors import ErrorCode

MAX_HEADER_BYTES: Final = 64 << 10
# What was written when a face closes gets this long to leave.
FLUSH_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one HTTP client may cost.

    `idle_s` is between two requests.  It is longer than clients keep an idle connection (5 s, say
    httpx and openai): who hangs up first must not be us, just as they send the next request.
    """

    max_connections: int = 4096
    grace_s: float = 5.0
    idle_s: float = 120.0


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    limits = Limits()
    _timer: asyncio.TimerHandle | None = None
    _is_in_headers = True
    _is_in_body = False
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503, "too many connections", ErrorCode.OVERLOADED.label)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_in_headers and self._timer is None:
            self._arm()
        self._header_bytes += len(data)
        super().data_received(data)
        if not self._is_in_headers:
            self._header_bytes = 0
        elif self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"the headers are over {MAX_HEADER_BYTES} bytes", "headers_too_large")

    def on_headers_complete(self) -> None:
        self._disarm()
        self._is_in_headers, self._is_in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_headers, self._is_in_body, self._header_bytes = True, False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body:  # nobody will read the rest of it
            self._hang_up()

    def timeout_keep_alive_handler(self) -> None:
        self._hang_up()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not HTTP/1.1", "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer, unless an answer is under way already, and hang up."""
        if self.cycle is None or self.cycle.response_complete:
            headers = (retry_after(),) if status == 503 else ()
            self.transport.write(_response(HttpError(status, message, code=code, headers=headers)))
        self._hang_up()

    def _hang_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
            self._disarm()
            self._timer = self.loop.call_later(FLUSH_S, self.transport.abort)

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.limits.grace_s, self._on_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_slow(self) -> None:
        self._timer = None
        self._refuse(408, "the headers came too slowly", "header_timeout")


class HttpServer(uvicorn.Server):
    """uvicorn on our loop: the socket is bound at once, signals are the process's business."""

    def __init__(
        self, app: object, host: str, port: int, limits: Limits, tls: ssl.SSLContext | None
    ) -> None:
        guarded = type("Guarded", (GuardedProtocol,), {"limits": limits})
        super().__init__(
            uvicorn.Config(
                cast(Any, app),
                loop="none",
                http=guarded,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=cast(int, limits.idle_s),
                timeout_graceful_shutdown=round(FLUSH_S),
            )
        )
        self._guarded, self._limits, self._tls = guarded, limits, tls
        self._socket = bind(host, port)
        bound_host, self.port = self._socket.getsockname()[:2]
        shown = f"[{bound_host}]" if ":" in bound_host else bound_host
        self.url = f"{'https' if tls else 'http'}://{shown}:{self.port}"

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; uvicorn's own bounds neither the time nor the number of TLS handshakes."""
        server = await listen(
            lambda: self._guarded(self.config, self.server_state, {}),
            self._socket,
            self._tls,
            handshake_s=self._limits.grace_s,
            max_handshakes=self._limits.max_connections,
        )
        self.servers = [cast(asyncio.Server, server)]
        self.started = True

    async def run_on_loop(self) -> None:
        """Serve until `should_exit`."""
        await self.serve(sockets=[self._socket])


def _response(error: HttpError) -> bytes:
    """Return a whole HTTP/1.1 response, for when there is no request to answer."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(error.body)),
        (b"connection", b"close"),
        *error.headers,
    ]
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    return b"HTTP/1.1 %d \r\n%s\r\n%s" % (error.status, lines, error.body)
