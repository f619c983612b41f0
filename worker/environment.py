"""A worker's access to the outside: the time, its sockets, the threads that compute and copy.

The parts of a worker know their sockets and threads by the interfaces declared here.  `Environment`
has the real ones; the simulation (`tests/simulation`) passes virtual time, sockets on a network of
its own, and threads that are events, and so runs the very code that serves.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from wire.aio.unix import DescriptorPort, fetch_descriptor
from wire.aio.zmq import Link, Sending
from wire.identity import Identity
from wire.parts import Buffer
from wire.process.frame_counters import Traffic
from wire.process.keys import Keys
from worker.compute.contract import KVCache
from worker.config import Config
from worker.engine.engine import Engine
from worker.engine.outputs import Output
from worker.engine.thread import Call, EngineThread
from worker.transfer.sockets import KVPlane
from worker.transfer.thread import Copies


class Connection(Protocol):
    """The way to one peer (`wire.aio.zmq.Link`)."""

    @property
    def is_up(self) -> bool: ...
    def send(self, parts: Sequence[Buffer], *, track: bool = False) -> Sending | None: ...
    async def close(self, linger_s: float = 0.0) -> None: ...


class Listener(Protocol):
    """A bound socket with many peers (`wire.aio.zmq.Hub`)."""

    def bind(self, endpoint: str) -> str: ...
    def send(
        self, peer: bytes, parts: Sequence[Buffer], *, track: bool = False
    ) -> Sending | None: ...
    async def close(self, linger_s: float = 0.0) -> None: ...


class Connect(Protocol):
    """Connects to a router; the callbacks are those of `wire.aio.zmq.Link`.  Raises OSError."""

    def __call__(
        self,
        identity: bytes,
        endpoint: str,
        on_message: Callable[[list[Buffer]], None],
        *,
        on_up: Callable[[], None],
        on_down: Callable[[], None],
        keys: Keys | None = None,
        traffic: Traffic | None = None,
    ) -> Connection: ...


class Plane(Protocol):
    """Where KV travels (`worker.transfer.sockets.KVPlane`)."""

    traffic: Traffic

    @property
    def is_encrypted(self) -> bool: ...
    def hub(
        self, on_message: Callable[[bytes, list[Buffer]], None], on_lost: Callable[[bytes], None]
    ) -> Listener: ...
    def link(
        self,
        identity: bytes,
        endpoint: str,
        on_message: Callable[[list[Buffer]], None],
        on_down: Callable[[], None],
        server: str = "",
    ) -> Connection: ...
    async def close(self) -> None: ...


class Computing(Protocol):
    """Where the engine runs (`worker.engine.thread.EngineThread`)."""

    @property
    def is_busy(self) -> bool: ...
    def start(self) -> None: ...
    def post(self, call: Call) -> None: ...
    def stop(self, *, wait_s: float | None = None) -> bool: ...


class Copying(Protocol):
    """Where KV is packed and unpacked (`worker.transfer.thread.Copies`)."""

    num_at_once: int

    def run(self, copy: Callable[..., Any], *args: Any, num_bytes: int) -> Awaitable[Any]: ...
    def close(self) -> None: ...


class Port(Protocol):
    """Hands a file descriptor out to who asks for it by name (`wire.aio.unix.DescriptorPort`)."""

    @property
    def name(self) -> str: ...
    def close(self) -> None: ...


# Both as in `wire.aio.unix`: a port of a descriptor and a greeting, and a descriptor, with what is
# said of it, by the name of its port and its greeting.
MakePort = Callable[[int, bytes], Port]
Fetch = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]


@dataclass(frozen=True, slots=True)
class Environment:
    """`clock` gives monotonic seconds, `epoch` a number that grows from process to process."""

    clock: Callable[[], float] = time.monotonic
    epoch: Callable[[], int] = time.time_ns
    connect: Connect = Link
    make_plane: Callable[[int, Keys | None], Plane] = KVPlane
    make_thread: Callable[
        [Engine, Callable[[list[Output]], None], Callable[[BaseException], None]], Computing
    ] = EngineThread
    make_copies: Callable[[int, int], Copying] = Copies
    make_port: MakePort = DescriptorPort
    fetch: Fetch = fetch_descriptor


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A role's means: the worker's settings and identity, its threads, KV and sockets."""

    config: Config
    identity: Identity
    cache: KVCache
    engine: Computing
    copies: Copying
    plane: Plane
    clock: Callable[[], float]
    make_port: MakePort = DescriptorPort
    fetch: Fetch = fetch_descriptor
