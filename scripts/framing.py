"""HTTP/1.1 framing as a fuzz target: the router's own server around a small application, no socket.

Heads, bodies by length and by chunks, pipelined requests, whatever a mutation makes of them, in two
pieces and then the end of the connection.  What is written must be whole answers, nothing may be
raised anywhere, and no task may be left.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final, cast

import uvicorn

from router.http import HttpError, Receive, Scope, Send, read_body, respond
from router.httpserver import GuardedProtocol

CHUNKED: Final = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
SEEDS: Final = (
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello",
    CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
    CHUNKED + b"5;name=value\r\nhello\r\n1\r\n!\r\n0\r\nx-trailer: 1\r\n\r\n",
    b"GET /a HTTP/1.1\r\nhost: x\r\n\r\nGET /b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\nok",
    b"GET /a HTTP/1.0\r\n\r\n",
    b"GET /a HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    b"HEAD /%61?b=c%20d#e HTTP/1.1\r\nhost: x\r\nauthorization: Bearer y\r\n\r\n",
)
MAX_BODY_BYTES: Final = 64
_ANSWERS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Refused(Exception):
    """The server said 4xx, or nothing before the connection ended."""


class Pipe(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = bytearray()
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Framing:
    """Feeds connections one after another, on a loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._problems: list[dict[str, Any]] = []
        self._loop.set_exception_handler(lambda _, context: self._problems.append(context))
        self._config = uvicorn.Config(
            cast(Any, _answer), lifespan="off", log_config=None, log_level="critical", ws="none"
        )
        self._config.load()

    def feed(self, raw: bytes) -> None:
        """One connection.  Raises Refused; whatever else it raises is a finding."""
        pipe = Pipe()
        self._loop.run_until_complete(self._connection(raw, pipe))
        assert not self._problems, self._problems.pop()
        statuses = [int(status) for status in _ANSWERS.findall(pipe.written)]
        assert bool(pipe.written) == bool(statuses), "bytes that are no answer"
        assert 500 not in statuses, "the application raised"
        if not statuses or statuses[-1] >= 400:
            raise Refused

    async def _connection(self, raw: bytes, pipe: Pipe) -> None:
        state = uvicorn.server.ServerState()
        protocol = GuardedProtocol(self._config, state, {}, self._loop)
        protocol.connection_made(pipe)
        half = raw[0] % len(raw) if raw else 0
        for piece in (raw[:half], raw[half:]):
            if piece and not pipe.is_closing():
                protocol.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(8):  # pipelined requests are answered one after another
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        await asyncio.gather(*state.tasks)
        assert not state.connections, "a connection is left"


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body, within bounds, and answer with it."""
    try:
        body = await read_body(scope, receive, MAX_BODY_BYTES)
    except HttpError as error:
        await respond(send, error.status, error.body, headers=error.headers)
        return
    if body is not None:
        await respond(send, 200, body)
