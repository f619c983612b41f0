"""The sockets of a process: `Hub`, `Link` and the KV plane, as `wire.aio.zmq` has them.

`Port` and `fetch` are those where workers lend memory (`wire.aio.unix`); the memory is real.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from tests.simulation.loop import Process, State
from tests.simulation.network import Connection, Network
from wire.aio.outbox import Sending
from wire.errors import PeerLost
from wire.parts import Buffer
from wire.process.frame_counters import Traffic

RECONNECT_S: Final = (0.1, 2.0)
OnMessage = Callable[[list[Buffer]], None]


class Hub:
    """A bound ROUTER (`wire.aio.zmq.Hub`)."""

    def __init__(
        self,
        network: Network,
        process: Process,
        on_message: Callable[[bytes, list[Buffer]], None],
        on_lost: Callable[[bytes], None],
        *,
        is_kv: bool = False,
    ) -> None:
        self.network, self.process = network, process
        self.connected: dict[bytes, Connection] = {}  # until we hear of the end
        self._known: dict[bytes, Connection] = {}
        self._on_message, self._on_lost = on_message, on_lost
        self._is_kv = is_kv

    def bind(self, endpoint: str) -> str:
        if endpoint.endswith(":0"):
            endpoint = self.network.new_port()
        self.network.hubs[endpoint] = self
        return endpoint

    def receive(self, connection: Connection, parts: list[Buffer]) -> None:
        peer = connection.link.identity
        self._known[peer] = connection
        self._on_message(peer, parts)

    def send(self, peer: bytes, parts: Sequence[Buffer], *, track: bool = False) -> Sending | None:
        connection = self._known.get(peer)
        if connection is None or self.process.state is State.DEAD:
            raise PeerLost(peer.decode())
        if connection.is_over:
            return None  # lost, and we do not know it yet
        connection.to_link.send(parts, None, is_kv=self._is_kv)
        return None

    def forget(self, peer: bytes) -> None:
        self._known.pop(peer, None)

    def lose(self, connection: Connection) -> None:
        peer = connection.link.identity
        if self.connected.get(peer) is connection:
            del self.connected[peer]
        if self._known.get(peer) is connection:
            del self._known[peer]
            self._on_lost(peer)

    async def close(self, linger_s: float = 0.0) -> None:
        self.network.hubs = {k: hub for k, hub in self.network.hubs.items() if hub is not self}
        for connection in list(self.network.connections):
            if connection.hub is self:
                connection.close(connection.to_link)
        self._known.clear()


class Link:
    """A connected DEALER (`wire.aio.zmq.Link`); strangers are no part of the simulation."""

    def __init__(
        self,
        network: Network,
        process: Process,
        identity: bytes,
        endpoint: str,
        on_message: OnMessage,
        *,
        on_up: Callable[[], None] | None = None,
        on_down: Callable[[], None] | None = None,
        keys: None = None,
        traffic: Traffic | None = None,
        is_kv: bool = False,
    ) -> None:
        self.network, self.process, self.identity = network, process, identity
        self.on_message = on_message
        self.connection: Connection | None = None
        self._endpoint, self._on_up, self._on_down = endpoint, on_up, on_down
        self._is_kv, self._is_closed = is_kv, False
        self._outbox: list[tuple[Sequence[Buffer], Sending | None]] = []
        self._pause_s = RECONNECT_S[0]
        self._plan_connect(network.latency())

    @property
    def is_up(self) -> bool:
        return self.connection is not None

    def send(self, parts: Sequence[Buffer], *, track: bool = False) -> Sending | None:
        if self._is_closed or self.process.state is State.DEAD:
            raise PeerLost(self._endpoint)
        sending = Sending() if track else None
        if self.connection is None:
            self._outbox.append((parts, sending))
        elif self.connection.is_over:  # lost, and we do not know it yet
            if sending is not None:
                sending.drop()
        else:
            self.connection.to_hub.send(parts, sending, is_kv=self._is_kv)
        return sending

    def lose(self, connection: Connection) -> None:
        if self.connection is not connection or self._is_closed:
            return
        self.connection = None
        self._drop()
        self._pause_s = RECONNECT_S[0]
        self._plan_connect(self._pause_s * self.network.random.uniform(0.5, 1.5))
        if self._on_down is not None:
            self._on_down()

    async def close(self, linger_s: float = 0.0) -> None:
        self._is_closed = True
        self._drop()
        if self.connection is not None and not self.connection.is_over:
            self.connection.close(self.connection.to_hub)
        self.connection = None

    def _drop(self) -> None:
        for _, sending in self._outbox:
            if sending is not None:
                sending.drop()
        self._outbox.clear()

    def _plan_connect(self, delay_s: float) -> None:
        self.network.timeline.after(delay_s, self.process, self._connect)

    def _connect(self) -> None:
        if self._is_closed:
            return
        hub = self.network.hubs.get(self._endpoint)
        if hub is None or hub.process.state is not State.RUNNING or self._is_cut_off(hub.process):
            self._pause_s = min(2 * self._pause_s, RECONNECT_S[1])
            self._plan_connect(self._pause_s)
            return
        self.connection = Connection(self, hub)
        if self._on_up is not None:
            self._on_up()
        outbox, self._outbox = self._outbox, []
        for parts, sending in outbox:
            self.connection.to_hub.send(parts, sending, is_kv=self._is_kv)

    def _is_cut_off(self, other: Process) -> bool:
        network = self.network
        return network.is_blocked(self.process, other) or network.is_blocked(other, self.process)


class Plane:
    """The KV sockets of one process (`worker.transfer.sockets.KVPlane`)."""

    is_encrypted = False

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process, self.traffic = network, process, Traffic()

    def hub(
        self, on_message: Callable[[bytes, list[Buffer]], None], on_lost: Callable[[bytes], None]
    ) -> Hub:
        return Hub(self._network, self._process, on_message, on_lost, is_kv=True)

    def link(
        self,
        identity: bytes,
        endpoint: str,
        on_message: OnMessage,
        on_down: Callable[[], None],
        server: str = "",
    ) -> Link:
        return Link(
            self._network,
            self._process,
            identity,
            endpoint,
            on_message,
            on_down=on_down,
            is_kv=True,
        )

    async def close(self) -> None:
        """Nothing is left to wait for."""


# As `wire.aio.unix`: how long to wait for one that is stopped.
ANSWER_S: Final = 2.0


class Port:
    """Lends a descriptor as long as its process lives."""

    def __init__(
        self, network: Network, process: Process, descriptor: int, greeting: bytes
    ) -> None:
        self.process, self.descriptor, self.greeting = process, descriptor, greeting
        self.name = f"baton-{network.new_number()}"
        self._network = network
        network.memory[self.name] = self

    def close(self) -> None:
        self._network.memory.pop(self.name, None)


async def fetch(
    network: Network, process: Process, name: str, greeting: bytes
) -> tuple[int, bytes]:
    """Return the descriptor that is lent under this name."""
    await _pause(process, network.latency())
    port = network.memory.get(name)
    if port is None or port.process.state is State.DEAD:
        raise ConnectionRefusedError("nobody lends this")
    if port.process.state is State.STOPPED:
        await _pause(process, ANSWER_S)
        raise TimeoutError("who lends this does not answer")
    if port.greeting != greeting:
        raise ConnectionError("who lends this is another worker")
    return os.dup(port.descriptor), b""


async def _pause(process: Process, seconds: float) -> None:
    over = process.create_future()
    process.call_later(seconds, _end, over)
    await over


def _end(over: Any) -> None:
    if not over.done():
        over.set_result(None)
