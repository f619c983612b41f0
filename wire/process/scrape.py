"""A small HTTP/1.1 server for `/metrics` and `/livez`, with one response per connection.

If API keys are configured, `/metrics` needs one.  Slow clients and clients over the connection
limit are disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import h11
import structlog

from wire.process.api_keys import ApiKeys, bearer, digest
from wire.process.exposition import CONTENT_TYPE

_LOG = structlog.get_logger(__name__)

MAX_CONNECTIONS: Final = 16
MAX_HEAD_BYTES: Final = 8 << 10
# Timeout for receiving the request and sending the response.
PATIENCE_S: Final = 5.0


@dataclass(eq=False, repr=False)
class ScrapePort:
    """Serves `render()` at GET /metrics, and at GET /livez 200 while `is_alive()`, else 503."""

    render: Callable[[], bytes]
    is_alive: Callable[[], bool]
    api_keys: ApiKeys | None = None
    patience_s: float = PATIENCE_S
    port: int = 0
    _server: asyncio.Server | None = None
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    async def listen(self, endpoint: str) -> None:
        """Start serving on HOST:PORT, and set `port` to the actual port.  Raises OSError."""
        host, _, port = endpoint.rpartition(":")
        self._server = await asyncio.start_server(self._on_client, host.strip("[]"), int(port))
        self.port = self._server.sockets[0].getsockname()[1]
        _LOG.info("metrics", url=f"http://{host}:{self.port}/metrics")

    async def close(self) -> None:
        """Stop serving and close open connections."""
        if self._server is None:
            return
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self.patience_s):
                writer.write(await self._answer(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError):
            pass
        except Exception:
            _LOG.exception("no metrics")
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            while (event := connection.next_event()) is h11.NEED_DATA:
                connection.receive_data(await reader.read(MAX_HEAD_BYTES))
        except h11.RemoteProtocolError as error:
            return _response(connection, error.error_status_hint, b"this is not HTTP/1.1\n")
        if not isinstance(event, h11.Request):
            return b""  # the client disconnected without a request
        return _response(connection, *self._find(event))

    def _find(self, request: h11.Request) -> tuple[int, bytes]:
        path = request.target.partition(b"?")[0]
        if path == b"/livez" and request.method == b"GET":  # a container's probe has no key
            return (200, b"alive\n") if self.is_alive() else (503, b"the engine is stuck\n")
        headers = dict(request.headers)
        if self.api_keys is not None:
            key = bearer(headers.get(b"authorization"))
            if not self.api_keys.allow(digest(key)):
                return 401, b"send Authorization: Bearer KEY\n"
        if path not in (b"/metrics", b"/livez"):
            return 404, b"there are /metrics and /livez here\n"
        if request.method != b"GET":
            return 405, b"use GET\n"
        return 200, self.render()


def _response(connection: h11.Connection, status: int, body: bytes) -> bytes:
    """Encode a complete response that closes the connection."""
    headers = [
        (b"content-type", CONTENT_TYPE if status == 200 else b"text/plain"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    events = (
        h11.Response(status_code=status, headers=headers),
        h11.Data(data=body),
        h11.EndOfMessage(),
    )
    return b"".join(connection.send(event) or b"" for event in events)
