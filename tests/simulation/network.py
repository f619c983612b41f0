"""ZeroMQ over TCP as `wire.aio.zmq` shows it, without sockets: what may happen does, by a seed.

Within a connection messages come in order and at most once; different ones overtake each other.  A
cut loses what is under way, and each side hears of it in its own time; a partition holds everything
back and nobody hears anything.  A second connection of an identity that is connected is never
heard.  What is sent is read when it arrives, as with zero copy, so a buffer that was reused too
early is seen.  `Mischief` adds faults that TCP never has, and that a KV transfer must survive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from struct import unpack_from
from typing import TYPE_CHECKING, Final, TypeVar

from tests.simulation.loop import Process, Timeline
from wire.aio.outbox import Sending
from wire.errors import ErrorCode, WireError
from wire.frames import Tag
from wire.parts import Buffer

if TYPE_CHECKING:
    from tests.simulation.sockets import Hub, Link, Port

T = TypeVar("T")
_TWICE: Final = {int(Tag.KV_CACHE_ACK), int(Tag.CANCEL), int(Tag.ERROR)}


def kind_of(parts: Sequence[Buffer]) -> tuple[int, int]:
    """Return the tag and the request id of a message; tag 0 for an offer or a keepalive."""
    (tag,) = unpack_from("<I", parts[0])
    request_id, segment = unpack_from("<QI", parts[1])
    return (0 if tag == Tag.KV_CACHE and segment == 0 else tag), request_id


@dataclass
class Mischief:
    """The probabilities of a segment or ACK that comes twice, early or with a changed byte.

    An offer is left alone, but for the KV that comes with it: everything else refers to it.
    """

    random: Random
    twice: float = 0.0
    swapped: float = 0.0
    corrupt: float = 0.0

    def copies(self, parts: Sequence[Buffer]) -> list[Sequence[Buffer]]:
        """Return what arrives of a message."""
        tag, _ = kind_of(parts)
        has_kv = tag == Tag.KV_CACHE or (tag == 0 and len(parts) > 3)
        if has_kv and self.random.random() < self.corrupt:
            kv = bytearray(parts[-1])
            kv[self.random.randrange(len(kv))] ^= 1
            parts = [*parts[:-1], bytes(kv)]
        if (tag == Tag.KV_CACHE or tag in _TWICE) and self.random.random() < self.twice:
            return [parts, parts]
        return [parts]

    def swap(self, queue: deque[tuple[Sequence[Buffer], T] | None]) -> None:
        """Let the last message overtake the one before it, if they are of one kind."""
        if len(queue) < 2 or self.random.random() >= self.swapped:
            return
        before, last = queue[-2], queue[-1]
        if before is None or last is None:
            return
        kind = kind_of(last[0])
        if kind == kind_of(before[0]) and kind[0] in (Tag.KV_CACHE, Tag.KV_CACHE_ACK):
            queue[-2], queue[-1] = last, before


class _Departure:
    """Whether the buffers of a message are free (a `wire.aio.outbox.Tracker`)."""

    done = False

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self._parts, self._sent = parts, _digest(parts)

    def leave(self, parts: Sequence[Buffer]) -> None:
        """Assert that nothing was changed on the way, but by mischief."""
        if parts is self._parts and not self.done:
            assert _digest(parts) == self._sent, "a buffer was reused while it was being sent"
        self.done = True


def _digest(parts: Sequence[Buffer]) -> int:
    return hash(b"".join(parts))


Parcel = tuple[Sequence[Buffer], _Departure]


class Pipe:
    """One direction of a connection."""

    def __init__(
        self,
        network: Network,
        source: Process,
        target: Process,
        deliver: Callable[[list[Buffer]], None],
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
        departure = _Departure(parts)
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
        departure.leave(parts)
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


# How long a side may take a connection for alive that was cut.
HALF_OPEN_S: Final = 3.0


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
        self.memory: dict[str, Port] = {}  # that is lent, by name; a name is never used again
        self.connections: list[Connection] = []
        self._latency_s = latency_s
        self._num_ports = 0
        self._blocked: set[tuple[str, str]] = set()

    def latency(self) -> float:
        return self.random.uniform(*self._latency_s)

    def new_port(self) -> str:
        return f"tcp://127.0.0.1:{20_000 + self.new_number()}"

    def new_number(self) -> int:
        self._num_ports += 1
        return self._num_ports

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
        self.memory = {k: port for k, port in self.memory.items() if port.process is not process}
        for connection in list(self.connections):
            if process in (connection.link.process, connection.hub.process):
                connection.cut()
