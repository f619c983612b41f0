"""A worker's access to the outside: the clock, sockets, and the threads that compute and copy.

`Environment` has the real ones.  The simulation (`tests/simulation`) passes virtual time, simulated
sockets, and events in place of threads, and so runs the very code that serves.
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
    """Makes the sockets for KV (`worker.transfer.sockets.KVPlane`)."""

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
    """Runs the engine (`worker.engine.thread.EngineThread`)."""

    @property
    def is_busy(self) -> bool: ...
    def start(self) -> None: ...
    def post(self, call: Call) -> None: ...
    def stop(self, *, wait_s: float | None = None) -> bool: ...


class Copying(Protocol):
    """Packs and unpacks KV (`worker.transfer.thread.Copies`)."""

    num_at_once: int

    def run(self, copy: Callable[..., Any], *args: Any, num_bytes: int) -> Awaitable[Any]: ...
    def close(self) -> None: ...


class Port(Protocol):
    """Offers a file descriptor under a name (`wire.aio.unix.DescriptorPort`)."""

    @property
    def name(self) -> str: ...
    def close(self) -> None: ...


# Connects to a router, with the arguments of `wire.aio.zmq.Link`.
Connect = Callable[..., Connection]
# As in `wire.aio.unix`: offer a descriptor; fetch one, and its description, by port and greeting.
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
        [Engine, Callable[[list[Output]], object], Callable[[BaseException], object]], Computing
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
    outside: Environment
