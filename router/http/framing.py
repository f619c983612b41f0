"""How HTTP messages are framed: what is refused of requests, and how answers are written."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.api.errors import Header, HttpError
from router.http.asgi import Event, Receive, Scope, Send

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def framing_problem(headers: Sequence[Header], http_version: str) -> str:
    """Say what in these headers two servers might read differently; empty when nothing is.

    RFC 9112: a request has one Host (3.2), and chunked is the only transfer coding read here (6.1).
    """
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        return "there are two Host headers"
    if not hosts and http_version != "1.0":
        return "there is no Host header"
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or http_version == "1.0"):
        return "the only Transfer-Encoding taken is chunked, in HTTP/1.1"
    return ""


def answered(error: HttpError) -> bytes:
    """Return a whole response of HTTP/1.1, for when there is no request to answer."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(error.body)),
        (b"connection", b"close"),
        *error.headers,
    ]
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    return b"HTTP/1.1 %d \r\n%s\r\n%s" % (error.status, lines, error.body)


class Beginning:
    """The transport of an answer that has not begun: its head is written with its first bytes.

    Two writes would take twice as long, and wake the client for nothing.
    """

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        # Weakly, for it has us: no circle is left for the garbage collector.
        self._cycle = cast(RequestResponseCycle, weakref.proxy(cycle))
        self._transport = cycle.transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        # Before its answer the client may be told to send its body.
        if not self._cycle.response_started:
            self._transport.write(data)
        elif self._head:
            self._begin(data)
        else:
            self._head = data

    def close(self) -> None:
        """Hang up, also on an answer that broke off after its head."""
        self._begin(b"")
        self._transport.close()

    def _begin(self, data: bytes) -> None:
        self._cycle.transport = self._transport
        self._transport.write(self._head + data)


class Unchunked:
    """Answers an HTTP/1.0 request: a body of unknown length ends with the connection.

    It gives uvicorn the length of each piece for that of the body.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.transport = cycle.transport
        self._cycle = cycle
        self._is_endless = False

    async def send(self, event: Event) -> None:
        cycle = self._cycle
        if event["type"] == "http.response.start":
            self._is_endless = b"content-length" not in dict(event["headers"])
            cycle.chunked_encoding = False if self._is_endless else None
        elif self._is_endless:
            cycle.expected_content_length = len(event.get("body", b""))
        await cycle.send(cast(Any, event))


def unchunked(app: App) -> App:
    """Return the application for requests of HTTP/1.0."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, Unchunked(cast(Any, send).__self__).send)

    return answer
