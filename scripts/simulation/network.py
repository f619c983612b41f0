"""ZeroMQ over TCP as `wire.aio.zmq` shows it, without sockets: what may happen does, by a seed.

Within a connection messages come in order and at most once; different ones overtake each other.  A
cut loses what is under way, and each side hears of it in its own time; a partition holds everything
back and nobody hears anything.  A second connection of one identity is never heard.  What is sent
is read when it arrives, as with zero copy: a buffer that is reused too early arrives changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from scripts.simulation.loop import Process, State, Timeline
from scripts.simulation.mischief import Mischief
from wire.aio.outbox import Sending
from wire.errors import ErrorCode, PeerLost, WireError
from wire.parts import Buffer

RECONNECT_S: Final = (0.1, 2.0)
# How long a side may take a connection for alive that was cut.
HALF_OPEN_S: Final = 3.0
OnMessage = Callable[[list[Buffer]], None]


class _Departure:
    """Whether the buffers of a message are free (a `wire.aio.outbox.Tracker`)."""

    done = False


Parcel = tuple[Sequence[Buffer], _Departure]


class Network:
    """Every connection of the world."""

    def __init__(
        self,
        timeline: Timeline,
        random: Random,
        *,
        latency_s: tuple[float, float],
        queue_bytes: int,
        note: Callable[[str, str, Sequence[Buffer]], None],
        mischief: Mischief,
    ) -> None:
        self.timeline, self.random, self.queue_bytes = timeline, random, queue_bytes
        self.note, self.mischief = note, mischief
        self.hubs: dict[str, Hub] = {}
        self.connections: list[Connection] = []
        self._latency_s = latency_s
        self._num_ports = 0
        self._blocked: set[tuple[str, str]] = set()

    def latency(self) -> float:
        return self.random.uniform(*self._latency_s)

    def new_port(self) -> str:
        self._num_ports += 1
        return f"tcp://127.0.0.1:{20_000 + self._num_ports}"

    def is_blocked(self, source: Process, target: Process) -> bool:
        return (source.name, target.name) in self._blocked

    def block(self, source: str, target: str) -> None:
        """From now on nothing that `source` sends reaches `target`."""
        self._blocked.add((source, target))

    def heal(self) -> None:
        """End every partition; what was held back arrives."""
        self._blocked.clear()
        for connection in list(self.connections):
            for pipe in connection.pipes:
                pipe.resume()

    def cut(self, name: str, other: str = "") -> None:
        """Break the connections of a process, or those between two."""
        for connection in list(self.connections):
            names = {connection.link.process.name, connection.hub.process.name}
            if name in names and (not other or other in names):
                connection.cut(late_s=HALF_OPEN_S)

    def lose(self, process: Process) -> None:
        """A process has died: its listeners are gone, its connections end."""
        self.hubs = {k: hub for k, hub in self.hubs.items() if hub.process is not process}
        for connection in list(self.connections):
            if process in (connection.link.process, connection.hub.process):
                connection.cut()


class Pipe:
    """One direction of a connection."""

    def __init__(
        self,
        network: Network,
        source: Process,
        target: Process,
        deliver: OnMessage,
        on_end: Callable[[], None],
    ) -> None:
        self._network, self._source, self._target = network, source, target
        self._deliver, self._on_end = deliver, on_end
        self._queue: deque[Parcel | None] = deque()
        self._num_bytes = 0
        self._num_due = 0  # whose time has come, but the way is blocked
        self._last_s = 0.0

    def send(self, parts: Sequence[Buffer], sending: Sending | None, *, is_kv: bool) -> None:
        """Raises WireError OVERLOADED when too much is under way."""
        size = sum(map(len, parts))
        if self._num_bytes + size > self._network.queue_bytes:
            raise WireError(ErrorCode.OVERLOADED, f"{self._num_bytes} bytes wait")
        departure = _Departure()
        if sending is not None:
            sending.hand_over([departure])
        mischief = self._network.mischief
        for parcel in mischief.copies(parts) if is_kv else (parts,):
            self._put((parcel, departure))
        if is_kv:
            mischief.swap(self._queue)

    def end(self) -> None:
        """Say that nothing follows."""
        self._put(None)

    def drop(self) -> None:
        for parcel in self._queue:
            if parcel is not None:
                parcel[1].done = True
        self._queue.clear()
        self._num_bytes = self._num_due = 0

    def resume(self) -> None:
        num_due, self._num_due = self._num_due, 0
        for _ in range(num_due):
            self._plan()

    def _put(self, parcel: Parcel | None) -> None:
        self._queue.append(parcel)
        self._num_bytes += 0 if parcel is None else sum(map(len, parcel[0]))
        self._plan()

    def _plan(self) -> None:
        timeline = self._network.timeline
        self._last_s = max(self._last_s, timeline.now + self._network.latency())
        timeline.at(self._last_s, self._target, self._arrive)

    def _arrive(self) -> None:
        if not self._queue:
            return  # it was cut meanwhile
        if self._network.is_blocked(self._source, self._target):
            self._num_due += 1
            return
        parcel = self._queue.popleft()
        if parcel is None:
            self._on_end()
            return
        parts, departure = parcel
        self._num_bytes -= sum(map(len, parts))
        received: list[Buffer] = [bytes(part) for part in parts]
        departure.done = True
        self._network.note(self._source.name, self._target.name, received)
        self._deliver(received)


class Connection:
    """Between a link and a hub, from the handshake to its end."""

    def __init__(self, link: Link, hub: Hub) -> None:
        self.link, self.hub = link, hub
        self.is_over = False
        self.is_deaf = link.identity in hub.connected
        network = link.network
        self.to_hub = Pipe(network, link.process, hub.process, self._on_hub, self._hub_hears_end)
        self.to_link = Pipe(network, hub.process, link.process, self._on_link, self._link_hears_end)
        self.pipes = (self.to_hub, self.to_link)
        network.connections.append(self)
        if not self.is_deaf:
            hub.connected[link.identity] = self

    def _on_hub(self, parts: list[Buffer]) -> None:
        if not self.is_deaf:
            self.hub.receive(self, parts)

    def _on_link(self, parts: list[Buffer]) -> None:
        if self.link.connection is self:
            self.link.on_message(parts)

    def cut(self, late_s: float = 0.3) -> None:
        """End it at once; both sides hear of it, each in its own time, `late_s` at most."""
        if self._finish():
            timeline, random = self.link.network.timeline, self.link.network.random
            for process, hear in (
                (self.link.process, self._link_hears_end),
                (self.hub.process, self._hub_hears_end),
            ):
                timeline.after(
                    random.choice((0.0, 0.01, 0.3, late_s)) * random.random(), process, hear
                )

    def close(self, pipe: Pipe) -> None:
        """One side closes: the other hears of it behind all that was sent."""
        pipe.end()

    def _finish(self) -> bool:
        if self.is_over:
            return False
        self.is_over = True
        self.link.network.connections.remove(self)
        for pipe in self.pipes:
            pipe.drop()
        return True

    def _link_hears_end(self) -> None:
        self._finish()
        self.link.lose(self)

    def _hub_hears_end(self) -> None:
        self._finish()
        self.hub.lose(self)


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
    """A connected DEALER (`wire.aio.zmq.Link`)."""

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
    """The KV sockets of one process (`worker.plane.KVPlane`)."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process

    def hub(
        self, on_message: Callable[[bytes, list[Buffer]], None], on_lost: Callable[[bytes], None]
    ) -> Hub:
        return Hub(self._network, self._process, on_message, on_lost, is_kv=True)

    def link(
        self, identity: bytes, endpoint: str, on_message: OnMessage, on_down: Callable[[], None]
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
