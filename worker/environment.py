"""Interfaces of the things that the simulation replaces: clock, sockets and threads.

The defaults of `Environment` are the real ones.  The simulation (`tests/simulation`) passes virtual
time, simulated sockets, and events instead of threads.  So it runs the same code as production.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
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
    """A connection to one peer (`wire.aio.zmq.Link`)."""

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


class Plane(Protocol):
    """Creates the sockets for KV transfer (`worker.transfer.sockets.KVPlane`)."""

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
    """A thread that runs the engine (`worker.engine.thread.EngineThread`)."""

    @property
    def is_busy(self) -> bool: ...
    def start(self) -> None: ...
    def post(self, call: Call) -> None: ...
    def stop(self, *, wait_s: float | None = None) -> bool: ...


class Copying(Protocol):
    """Threads that pack and unpack KV (`worker.transfer.thread.Copies`)."""

    num_at_once: int

    def run(self, copy: Callable[..., Any], *args: Any, num_bytes: int) -> Awaitable[Any]: ...
    def close(self) -> None: ...


class Port(Protocol):
    """A local socket that sends a file descriptor to clients (`wire.aio.unix.DescriptorPort`)."""

    @property
    def name(self) -> str: ...
    def close(self) -> None: ...


# Connects to a router, with the arguments of `wire.aio.zmq.Link`.
Connect = Callable[..., Connection]
# Arguments and results are those of `DescriptorPort` and `fetch_descriptor` in `wire.aio.unix`.
MakePort = Callable[[int, bytes], Port]
Fetch = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]


@dataclass(frozen=True, slots=True)
class Environment:
    """Factories, a monotonic `clock` in seconds, and `epoch`, which grows from start to start."""

    clock: Callable[[], float] = time.monotonic
    epoch: Callable[[], int] = time.time_ns
    connect: Connect = Link
    make_plane: Callable[[int, Keys | None], Plane] = KVPlane
    make_thread: Callable[
        [Engine, Callable[[list[Output]], object], Callable[[BaseException], object]], Computing
    ] = EngineThread
    make_copies: Callable[[int, int], Copying] = Copies
    make_port: MakePort = DescriptorPort
    fetch: Fetch = fetch_descriptor


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The parts of a worker that its role uses; `segment_traffic`: of segment connections."""

    config: Config
    identity: Identity
    cache: KVCache
    engine: Computing
    copies: Copying
    plane: Plane
    outside: Environment
    segment_traffic: Traffic = field(default_factory=Traffic)
