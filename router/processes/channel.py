"""The channel between a router process and the parent that started it: questions and answers.

A socket pair that one inherits from the other: nobody else can reach it, and it ends with either.
Both ends may ask at any time; an answer comes when there is one.  A message is its length (u32,
little-endian) and msgpack.
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
    """The first message to a process: which of `num_processes` it is, and where to listen.

    `is_again`: others went on serving while this one was away.
    """

    index: int
    num_processes: int
    http: str
    tcp: str
    bus: str
    is_again: bool


class AskAssignment(Struct, frozen=True, tag="assignment"):
    """Of the parent: may this process begin?  Answered with its `Assignment` when it may."""


class Listening(Struct, frozen=True, tag="listening"):
    """To the parent: this process serves; `try_this` is a command for a first completion."""

    endpoints: dict[str, str]
    try_this: str


class Drained(Struct, frozen=True, tag="drained"):
    """To the parent: no client is left here.  Answered when the local workers have left, too."""


class AskState(Struct, frozen=True, tag="state"):
    """How is this process?  `router.core.cluster.ProcessState`."""


class AskMetrics(Struct, frozen=True, tag="metrics"):
    """Ask a process for its metrics, as `router.processes.merged_metrics.Families`."""


class FindResponse(Struct, frozen=True, tag="find"):
    """Is this response kept here?  A `KeptResponse`, or None."""

    asker: str
    name: str


class DeleteResponse(Struct, frozen=True, tag="delete"):
    """Forget this response.  Whether it was here."""

    asker: str
    name: str


Question = AskState | AskMetrics | FindResponse | DeleteResponse


class AskAll(Struct, frozen=True, tag="all"):
    """Of the parent: ask every process.  Answered with `Answers`."""

    question: Question


class Answers(Struct, Generic[T]):
    """The replies of the processes that replied in time; `is_complete` if all did."""

    given: list[T]
    is_complete: bool


# What a process asks the parent, and the parent a process.
Asked = AskAssignment | Listening | Drained | AskAll | Question


class _Call(Struct, tag=True):
    number: int
    question: Asked


class _Reply(Struct, tag=True):
    number: int
    answer: msgspec.Raw


class Channel:
    """One end.  `answer(question)` returns what the other end is told; `open` comes first."""

    def __init__(self, ours: socket.socket, answer: Callable[[Any], Awaitable[object]]) -> None:
        self._socket = ours
        self._answer = answer
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Begin to answer, and to take answers, until the other end is gone."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
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
            pass  # its end
        finally:
            self._hang_up()

    async def ask(self, question: Asked, kind: type[T]) -> T:
        """Return the answer.

        Raises:
            ConnectionError: The other end is gone.
        """
        number, waiting = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = waiting
        try:
            self._send(_Call(number, question))
            return msgspec.msgpack.decode(await waiting, type=kind)
        finally:
            self._open.pop(number, None)

    async def close(self) -> None:
        """Hang up; whoever waits for an answer gets a ConnectionError."""
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
        with suppress(ConnectionError):  # who asked is gone
            self._send(_Reply(asked.number, msgspec.Raw(msgspec.msgpack.encode(answer))))

    def _send(self, message: _Call | _Reply) -> None:
        if self._writer is None or self._writer.is_closing():
            raise ConnectionError("the other process is gone")
        said = msgspec.msgpack.encode(message)
        self._writer.write(_LENGTH.pack(len(said)) + said)
