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
from enum import StrEnum, auto
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

_LENGTH: Final = struct.Struct("<I")
T = TypeVar("T")


class Assignment(Struct):
    """The index and the addresses of a process.

    `is_again` if it replaces another process; `inherits` if it gets that one's listening sockets.
    """

    index: int
    num_processes: int
    http: str
    tcp: str
    bus: str
    is_again: bool
    inherits: bool = False


class Ask(StrEnum):
    """A request without arguments."""

    # To the parent.
    ASSIGNMENT = auto()  # may this process start?  The reply is an `Assignment`
    # This process is about to accept workers.  The reply: the names of those its predecessor has,
    # None if there is no predecessor that could be asked.
    TAKE_BUS = auto()
    RESTART = auto()  # replace all processes.  The reply is why that failed, or ""
    # This process has no clients left.  The reply comes when all local workers have exited.
    DRAINED = auto()

    # To a process.
    RELEASE_BUS = auto()  # leave new workers to a successor.  The reply: the names of all workers
    KEEP_BUS = auto()  # accept workers again, because the successor failed
    RETIRE = auto()  # leave new clients to a successor, which serves, and end after the others
    STATE = auto()  # the reply is a `router.core.cluster.ProcessState`
    METRICS = auto()  # the reply is `merged_metrics.Families`


class Listening(Struct, frozen=True, tag="listening"):
    """A notice to the parent: this process serves clients.  `try_this` is an example command."""

    endpoints: dict[str, str]
    try_this: str


class AskActivity(Struct, frozen=True, tag="activity"):
    """A request for the `router.page.activity.Activity` of a process since a time."""

    since: float


class Find(Struct, frozen=True, tag="find"):
    """A request for what a process keeps under a name for a client; `asker` None: for any client.

    The reply is a stored response, the report on a request, or the choices of a request kept for
    replays; None if this process does not keep it.  Of "delete", which deletes a response, it is
    False then.
    """

    what: Literal["response", "report", "replay", "delete"]
    asker: str | None
    name: str


Question = Ask | AskActivity | Find


class AskAll(Struct, frozen=True, tag="all"):
    """A request to the parent to forward a request to every process.  The reply is `Answers`."""

    question: Question


class Answers(Struct, Generic[T]):
    """The replies that came in time; `is_complete` if every process replied in time."""

    given: list[T]
    is_complete: bool


class _Call(Struct, tag=True):
    number: int
    question: Question | Listening | AskAll


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

    async def ask(self, question: Question | Listening | AskAll, kind: type[T]) -> T:
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
        self._hang_up()  # a task that is cancelled before it starts does not
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
