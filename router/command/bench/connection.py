"""Connections for load generators: one request at a time, with little CPU per response.

The chunks of a response are stored with their times, and parsed only after the response has ended.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"


class Connection(asyncio.Protocol, ABC):
    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.sent_at = self.first_at = 0.0
        self.chunks: list[bytes] = []
        self.times: list[float] = []
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error or ConnectionError("the server closed the connection"))

    def send(self, request: bytes) -> asyncio.Future[None]:
        """Send a request; the future is done when the whole response is in `chunks`."""
        loop = asyncio.get_running_loop()
        self.chunks, self.times, self.first_at = [], [], 0.0
        self.first, self._done = loop.create_future(), loop.create_future()
        self.sent_at = time.monotonic()
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.chunks.append(data)
        self.times.append(now)
        if not self.first.done() and self.has_token(data):
            self.first_at = now
            self.first.set_result(None)
        # The future may be done already, if the request was cancelled.
        if self._done is not None and not self._done.done() and self.is_end(data):
            self._done.set_result(None)

    @abstractmethod
    def has_token(self, data: bytes) -> bool:
        """Whether these bytes have a token of the response."""

    @abstractmethod
    def is_end(self, data: bytes) -> bool:
        """Whether the response ends with these bytes."""

    @abstractmethod
    def num_tokens(self) -> int:
        """Return the approximate number of tokens received."""


class HttpConnection(Connection):
    """An HTTP/1.1 connection to `host`, with an API key unless it is ""."""

    def __init__(self, host: str = "localhost", api_key: str = "") -> None:
        super().__init__()
        self._headers = f"host: {host}\r\ncontent-type: application/json\r\n"
        if api_key:
            self._headers += f"authorization: Bearer {api_key}\r\n"
        self._has_head = False
        # The number of bytes missing from the body; None for a chunked one.
        self._left: int | None = None
        self._tail = b""

    @property
    def status(self) -> int:
        return int(self.chunks[0][9:12])

    @property
    def body(self) -> bytes:
        """The response body; a chunked body includes its framing."""
        return b"".join(self.chunks).partition(b"\r\n\r\n")[2]

    def post(self, path: str, body: dict[str, Any]) -> asyncio.Future[None]:
        return self.request("POST", path, json.dumps(body).encode())

    def request(self, method: str, path: str, body: bytes = b"") -> asyncio.Future[None]:
        self._has_head, self._left, self._tail = False, None, b""
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        return self.send(head.encode() + body)

    def events(self) -> Iterator[tuple[float, Any]]:
        """Yield the JSON body, or each JSON event of a stream, with the time it was received."""
        if b"text/event-stream" not in self.chunks[0].partition(b"\r\n\r\n")[0].lower():
            yield self.times[-1], json.loads(self.body)
            return
        line = b""
        for at, chunk in zip(self.times, self.chunks, strict=True):
            *lines, line = (line + chunk).split(b"\n")
            for each in lines:
                if each.startswith(b"data: {"):
                    yield at, json.loads(each[6:])

    def has_token(self, data: bytes) -> bool:
        return b'"choices"' in data

    def is_end(self, data: bytes) -> bool:
        if self._left is not None:
            self._left -= len(data)
        elif not self._has_head:
            head, end, body = b"".join(self.chunks).partition(b"\r\n\r\n")
            self._has_head = bool(end)
            _, found, length = head.lower().partition(b"content-length: ")
            if end and found:
                self._left = int(length.partition(b"\r\n")[0]) - len(body)
        self._tail = (self._tail + data)[-8:]
        is_last_chunk = self._has_head and self._tail.endswith(b"\r\n0\r\n\r\n")
        return is_last_chunk if self._left is None else self._left <= 0

    def num_tokens(self) -> int:
        return b"".join(self.chunks).count(b'"choices"')


async def open_http(
    host: str, port: int, api_key: str = "", *, is_tls: bool = False
) -> HttpConnection:
    """Connect over HTTP or HTTPS, with an API key unless it is "".  Raises OSError."""
    loop = asyncio.get_running_loop()
    tls = ssl.create_default_context() if is_tls else None
    made = partial(HttpConnection, host, api_key)
    return (await loop.create_connection(made, host, port, ssl=tls))[1]


async def open_url(url: str, api_key: str = "") -> HttpConnection:
    """Connect to the server of an http or https URL, as `open_http` does."""
    parts = urlsplit(url)
    assert parts.hostname, f"no URL: {url}"
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    return await open_http(parts.hostname, port, api_key, is_tls=is_tls)
