"""Framing of HTTP messages: checks of requests, and how responses are written."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.api.errors import Header, HttpError
from router.http.asgi import Event, Receive, Scope, Send

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def framing_problem(headers: Sequence[Header], http_version: str) -> str:
    """Return why two servers might read these headers differently, "" if they would not.

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


def error_response(error: HttpError) -> bytes:
    """Return a whole HTTP/1.1 response, for bytes that are no request."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(error.body)),
        (b"connection", b"close"),
        *error.headers,
    ]
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    return b"HTTP/1.1 %d \r\n%s\r\n%s" % (error.status, lines, error.body)


class Beginning:
    """The transport before a response starts: writes its head together with its first bytes.

    Two writes would take twice as long and wake the client for nothing.
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
            self._begin(data)
        else:
            self._head = data

    def close(self) -> None:
        """Close, also after a response that broke off after its head."""
        self._begin(b"")
        self._transport.close()

    def _begin(self, data: bytes) -> None:
        self._cycle.transport = self._transport
        self._transport.write(self._head + data)


class Unchunked:
    """Responds to HTTP/1.0: a body of unknown length ends with the connection.

    uvicorn gets the length of each chunk as that of the body.
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
