"""ZeroMQ over TCP as `wire.aio.zmq` shows it, without sockets: what may happen does, by a seed.

Within a connection messages come in order and at most once; different ones overtake each other.  A
cut loses what is under way, and each side hears of it in its own time; a partition holds everything
back and nobody hears anything.  Here is what holds for all connections; one of them is
`connection`, and what a process has in hand are `sockets`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Final

from tests.simulation.connection import Connection
from tests.simulation.loop import Process, Timeline
from tests.simulation.mischief import Mischief
from wire.parts import Buffer

if TYPE_CHECKING:
    from tests.simulation.memory import Port
    from tests.simulation.sockets import Hub

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
