"""One connection between a link and a hub: two pipes, and an end of which each side hears.

What is sent is read when it arrives, as with zero copy: that a buffer was reused too early is seen
then.  A second connection of an identity that is connected is never heard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.simulation.loop import Process
from wire.aio.outbox import Sending
from wire.errors import ErrorCode, WireError
from wire.parts import Buffer

if TYPE_CHECKING:
    from tests.simulation.network import Network
    from tests.simulation.sockets import Hub, Link


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
