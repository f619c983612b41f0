"""HTTP/1.1 framing as a fuzz target: the router's own server around a small application, no socket.

Heads, bodies by length and by chunks, pipelined requests, whatever a mutation makes of them, cut
anywhere into any number of pieces, and then the end of the connection.  What is written must be
whole answers, and where the borders are must not matter to the first of them; nobody is hung up on
without one, nothing may be raised anywhere, and no task may be left.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import zlib
from typing import Any, Final, cast

import uvicorn

from router.api.errors import HttpError
from router.http.asgi import Receive, Scope, Send, respond
from router.http.limits import read_body
from router.http.server import GuardedProtocol, Limits

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
    b"GET /a HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\nconnection: close\r\n\r\nhello",
    b"\r\n\r\nGET /a HTTP/1.1\r\nhost: x\r\n\r\n\r\nGET /b HTTP/1.1\r\nhost: x\r\n\r\n",
    b"HEAD /%61?b=c%20d#e HTTP/1.1\r\nhost: x\r\nauthorization: Bearer y\r\n\r\n",
)
MAX_BODY_BYTES: Final = 64
_ANSWERS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Refused(Exception):
    """The server said 4xx, or nothing before the connection ended."""


class Pipe(asyncio.Transport):
    """A transport that keeps what is written, over a socket that leads nowhere."""

    def __init__(self, sock: socket.socket) -> None:
        names = {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}
        super().__init__(names | {"socket": sock})
        self.written = bytearray()
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Untimed(GuardedProtocol):
    """The server without time limits, so that a busy machine changes no response."""

    limits = Limits(grace_s=1e6)


class Framing:
    """Feeds connections one after another, on a loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._socket = socket.socket()
        self._problems: list[dict[str, Any]] = []
        self._loop.set_exception_handler(lambda _, context: self._problems.append(context))
        self._config = uvicorn.Config(
            cast(Any, _answer), lifespan="off", log_config=None, log_level="critical", ws="none"
        )
        self._config.load()

    def feed(self, raw: bytes) -> None:
        """One connection, twice: cut into pieces, and whole.

        Raises Refused; whatever else it raises is a finding.
        """
        statuses = self._statuses(cut(raw))
        whole = self._statuses([raw])
        # A body in pieces may be refused for its size before it is for what comes later.
        first, at_once = ([status // 100 for status in each[:1]] for each in (statuses, whole))
        assert first == at_once, f"{statuses} in pieces, {whole} at once"
        if not statuses or statuses[-1] >= 400:
            raise Refused

    def _statuses(self, pieces: list[bytes]) -> list[int]:
        """The statuses of the responses on one connection."""
        pipe = Pipe(self._socket)
        self._loop.run_until_complete(self._connection(pieces, pipe))
        assert not self._problems, self._problems.pop()
        statuses = [int(status) for status in _ANSWERS.findall(pipe.written)]
        assert bool(pipe.written) == bool(statuses), "bytes that are no answer"
        assert 500 not in statuses, "the application raised"
        return [status for status in statuses if status != 100]

    async def _connection(self, pieces: list[bytes], pipe: Pipe) -> None:
        state = uvicorn.server.ServerState()
        protocol = Untimed(self._config, state, {}, self._loop)
        protocol.connection_made(pipe)
        for piece in pieces:
            if piece and not pipe.is_closing():
                protocol.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(8):  # pipelined requests are answered one after another
            await asyncio.sleep(0)
        assert pipe.written or not protocol.transport.is_closing(), "hung up on without an answer"
        protocol.connection_lost(None)
        await asyncio.gather(*state.tasks)
        assert not state.connections, "a connection is left"


def cut(raw: bytes) -> list[bytes]:
    """Cut an input where its checksum says: now and then into single bytes."""
    draw = random.Random(zlib.crc32(raw))
    if draw.random() < 0.1:
        return [raw[index : index + 1] for index in range(len(raw))]
    borders = sorted(draw.randrange(len(raw) + 1) for _ in range(draw.randrange(1, 9)))
    return [raw[start:end] for start, end in zip([0, *borders], [*borders, None], strict=True)]


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body, within bounds, and answer with it."""
    try:
        body = await read_body(scope, receive, MAX_BODY_BYTES)
    except HttpError as error:
        await respond(send, error.status, error.body, headers=error.headers)
        return
    if body is not None:
        await respond(send, 200, body)
