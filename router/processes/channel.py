"""RPC between a router process and its parent over an inherited socket pair.

Both ends may send requests at any time, and replies may come in any order.  A message is its
length (u32, little-endian) followed by msgpack.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct

_LENGTH: Final = struct.Struct("<I")
T = TypeVar("T")


class Assignment(Struct):
    """The index and the addresses of a process; `is_again` if it replaces a process that died."""

    index: int
    num_processes: int
    http: str
    tcp: str
    bus: str
    is_again: bool


class AskAssignment(Struct, frozen=True, tag="assignment"):
    """A request to the parent for permission to start.  The reply is an `Assignment`."""


class Listening(Struct, frozen=True, tag="listening"):
    """A notice to the parent: this process serves clients.  `try_this` is an example command."""

    endpoints: dict[str, str]
    try_this: str


class Drained(Struct, frozen=True, tag="drained"):
    """A process has no clients left.  The parent replies when all local workers have exited."""


class AskState(Struct, frozen=True, tag="state"):
    """A request for the state of a process.  The reply is a `router.core.cluster.ProcessState`."""


class AskMetrics(Struct, frozen=True, tag="metrics"):
    """A request for the metrics of a process.  The reply is `merged_metrics.Families`."""


class FindResponse(Struct, frozen=True, tag="find"):
    """A request for a stored response.  The reply is the response, or None if not stored here."""

    asker: str
    name: str


class FindRequest(Struct, frozen=True, tag="request"):
    """A request for a report on a request of a client, or of any.  The reply may be None."""

    asker: str | None
    name: str


class DeleteResponse(Struct, frozen=True, tag="delete"):
    """A request to delete a stored response.  The reply is False if it was not stored here."""

    asker: str
    name: str


Question = AskState | AskMetrics | FindResponse | FindRequest | DeleteResponse


class AskAll(Struct, frozen=True, tag="all"):
    """A request to the parent to forward a request to every process.  The reply is `Answers`."""

    question: Question


class Answers(Struct, Generic[T]):
    """The replies that came in time; `is_complete` if every process replied in time."""

    given: list[T]
    is_complete: bool


Asked = AskAssignment | Listening | Drained | AskAll | Question


class _Call(Struct, tag=True):
    number: int
    question: Asked


class _Reply(Struct, tag=True):
    number: int
    answer: msgspec.Raw


class Channel:
    """One end of the socket pair; `answer` computes the reply to a request.  Call `open` first."""

    def __init__(self, ours: socket.socket, answer: Callable[[Any], Awaitable[object]]) -> None:
        self._socket = ours
        self._answer = answer
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Start reading requests and replies."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Read messages until the other end closes, and dispatch them."""
        decoder = msgspec.msgpack.Decoder(_Call | _Reply)
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                message = decoder.decode(await reader.readexactly(length))
                if isinstance(message, _Call):
                    task = asyncio.create_task(self._respond(message))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                elif (waiting := self._open.pop(message.number, None)) and not waiting.done():
                    waiting.set_result(message.answer)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the other end closed
        finally:
            self._hang_up()

    async def ask(self, question: Asked, kind: type[T]) -> T:
        """Send a request and return the reply.  Raises ConnectionError."""
        number, waiting = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = waiting
        try:
            self._send(_Call(number, question))
            return msgspec.msgpack.decode(await waiting, type=kind)
        finally:
            self._open.pop(number, None)

    async def close(self) -> None:
        """Close the channel; pending requests raise ConnectionError."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._socket.close()

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        for task in self._answering:
            task.cancel()
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the other process is gone"))

    async def _respond(self, asked: _Call) -> None:
        answer = await self._answer(asked.question)
        with suppress(ConnectionError):
            self._send(_Reply(asked.number, msgspec.Raw(msgspec.msgpack.encode(answer))))

    def _send(self, message: _Call | _Reply) -> None:
        if self._writer is None or self._writer.is_closing():
            raise ConnectionError("the other process is gone")
        raw = msgspec.msgpack.encode(message)
        self._writer.write(_LENGTH.pack(len(raw)) + raw)
