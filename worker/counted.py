"""A worker's sockets with every frame counted: to its routers, and between the workers.

Around whatever `worker.environment` gives, so that the simulation's sockets are counted too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wire.aio.zmq import Sending
from wire.errors import WireError
from wire.parts import Buffer
from wire.process.keys import Keys
from wire.process.traffic import Traffic
from worker.environment import Connect, Connection, Listener, Plane


class CountedConnect:
    """Connects to routers as `connect` does, by default with `keys`."""

    def __init__(self, connect: Connect, keys: Keys | None) -> None:
        self.traffic = Traffic()
        self._connect, self._keys = connect, keys

    def __call__(
        self,
        identity: bytes,
        endpoint: str,
        on_message: Callable[[list[Buffer]], None],
        *,
        on_up: Callable[[], None],
        on_down: Callable[[], None],
        keys: Keys | None = None,
    ) -> Connection:
        def hear(parts: list[Buffer]) -> None:
            self.traffic.hear(parts)
            on_message(parts)

        keys = keys or self._keys
        link = self._connect(identity, endpoint, hear, on_up=on_up, on_down=on_down, keys=keys)
        return CountedConnection(link, self.traffic)


class CountedPlane:
    """The KV sockets; `num_up` is how many connections to other workers are up."""

    def __init__(self, plane: Plane) -> None:
        self.traffic = Traffic()
        self._plane = plane
        self._links: set[CountedConnection] = set()

    @property
    def num_up(self) -> int:
        return sum(link.is_up for link in self._links)

    def hub(
        self, on_message: Callable[[bytes, list[Buffer]], None], on_lost: Callable[[bytes], None]
    ) -> Listener:
        def hear(peer: bytes, parts: list[Buffer]) -> None:
            self.traffic.hear(parts)
            on_message(peer, parts)

        return CountedListener(self._plane.hub(hear, on_lost), self.traffic)

    def link(
        self,
        identity: bytes,
        endpoint: str,
        on_message: Callable[[list[Buffer]], None],
        on_down: Callable[[], None],
        server: str = "",
    ) -> Connection:
        def hear(parts: list[Buffer]) -> None:
            self.traffic.hear(parts)
            on_message(parts)

        link = CountedConnection(
            self._plane.link(identity, endpoint, hear, on_down, server),
            self.traffic,
            self._links.discard,
        )
        self._links.add(link)
        return link

    async def close(self) -> None:
        await self._plane.close()


class CountedConnection:
    """The way to one peer; `on_close` is called with it."""

    def __init__(
        self,
        connection: Connection,
        traffic: Traffic,
        on_close: Callable[[CountedConnection], Any] | None = None,
    ) -> None:
        self._connection, self._traffic, self._on_close = connection, traffic, on_close

    @property
    def is_up(self) -> bool:
        return self._connection.is_up

    def send(self, parts: Sequence[Buffer], *, track: bool = False) -> Sending | None:
        try:
            sending = self._connection.send(parts, track=track)
        except WireError as error:
            self._traffic.drop(error)
            raise
        self._traffic.say(parts)
        return sending

    async def close(self, linger_s: float = 0.0) -> None:
        if self._on_close is not None:
            self._on_close(self)
        await self._connection.close(linger_s)


class CountedListener:
    """A bound socket with many peers."""

    def __init__(self, listener: Listener, traffic: Traffic) -> None:
        self._listener, self._traffic = listener, traffic

    def bind(self, endpoint: str) -> str:
        return self._listener.bind(endpoint)

    def send(self, peer: bytes, parts: Sequence[Buffer], *, track: bool = False) -> Sending | None:
        try:
            sending = self._listener.send(peer, parts, track=track)
        except WireError as error:
            self._traffic.drop(error)
            raise
        self._traffic.say(parts)
        return sending

    async def close(self, linger_s: float = 0.0) -> None:
        await self._listener.close(linger_s)
