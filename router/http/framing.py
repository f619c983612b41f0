"""Framing of HTTP messages: checks requests, and adapts how uvicorn writes responses."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.api.errors import Header, HttpError
from router.http.asgi import Event, Receive, Scope, Send
from wire.parts import Buffer

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def framing_problem(headers: Sequence[Header], http_version: str) -> str:
    """Return why another server might interpret the headers differently, or "" if it could not.

    By RFC 9112 a request must have one Host header (3.2).  The only transfer coding supported here
    is chunked (6.1).
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


def error_response(error: HttpError) -> bytes:
    """Return a whole HTTP/1.1 response to bytes that are not a valid request."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(error.body)),
        (b"connection", b"close"),
        *error.headers,
    ]
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    return b"HTTP/1.1 %d \r\n%s\r\n%s" % (error.status, lines, error.body)


class HeadBuffer:
    """The transport of a new response: writes its head together with the first bytes of its body.

    Two writes would take twice as long and wake the client up once more for nothing.
    """

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        # A weak reference, since the cycle refers to this object.
        self._cycle = cast(RequestResponseCycle, weakref.proxy(cycle))
        self._transport = cycle.transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._cycle.response_started:  # "100 Continue"
            self._transport.write(data)
        elif self._head:
            self._flush(data)
        else:
            self._head = data

    def close(self) -> None:
        """Flush the head, which is pending if the response was aborted after it, and close."""
        self._flush(b"")
        self._transport.close()

    def _flush(self, data: bytes) -> None:
        self._cycle.transport = self._transport
        self._transport.write(self._head + data)


class Unchunked:
    """Sends a response to an HTTP/1.0 client: a body of unknown length ends with the connection.

    Before each chunk, uvicorn's expected body length is set to the chunk's, so that it accepts it.
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
    """Wrap the application for HTTP/1.0 requests."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, Unchunked(cast(Any, send).__self__).send)

    return run


class Resuming(Protocol):
    """A protocol that goes on with these bytes after a request that offered an upgrade."""

    def resume(self, rest: bytes) -> None: ...


class Parser(httptools.HttpRequestParser):
    """A parser that ignores upgrade offers."""

    def __init__(self, protocol: Resuming) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        # As in uvicorn, bytes after a request with "Connection: close" are not an error.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Buffer) -> None:  # type: ignore[override]
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._protocol.resume(bytes(data)[offer.args[0] :])
