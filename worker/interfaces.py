"""What a worker needs of its sockets and threads, as interfaces: types only, nothing to run.

`worker.environment` names the real things; the simulation (`tests.simulation`) has its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from wire.aio.zmq import Sending
from wire.parts import Buffer
from wire.process.keys import Keys
from worker.engine.thread import Call


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
    ) -> Connection: ...


class Plane(Protocol):
    """Where KV travels (`worker.transfer.sockets.KVPlane`)."""

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
    def stop(self, *, wait: bool = True) -> None: ...


class Copying(Protocol):
    """Where KV is packed and unpacked (`worker.transfer.thread.Copies`)."""

    num_at_once: int

    def run(self, copy: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...
    def close(self) -> None: ...
