"""ZeroMQ on the event loop: `Hub`, a bound ROUTER, and `Link`, a connected DEALER.  SPEC 2.1.

Sockets never block: `wire.aio.pump` runs them, and messages that a peer cannot take wait in its
`wire.aio.outbox`, bounded in bytes.  `on_lost` follows a peer's last message; a peer that vanishes
without closing TCP is noticed after 25 to 30 s, so callers send heartbeats.  A second connection
under a connected identity is never heard, hence identities carry the epoch of their process.

With keys, everything is encrypted (CURVE): a hub admits the parties that `wire.aio.zap` knows, a
link connects to one named party.  Sockets belong to the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import structlog
import zmq

from wire.aio.outbox import Limits, Outbox, Sending
from wire.aio.peers import Peers
from wire.aio.port import (
    ENDED,
    LAST,
    REFUSED,
    Context,
    Port,
    link_options,
    server_options,
    terminate,
)
from wire.aio.pump import Pump, guarded
from wire.aio.reconnect import Reconnect
from wire.aio.unauthenticated import UnauthenticatedConnections
from wire.aio.zap import Gate, cut, prove
from wire.errors import PeerLost, WireError
from wire.parts import Buffer
from wire.process.frame_counters import Traffic
from wire.process.keys import Keys

__all__ = ["Context", "Hub", "Link", "Sending", "terminate"]

_LOG = structlog.get_logger(__name__)


class Hub:
    """A bound ROUTER: many peers, each known by its routing id from its first message on.

    `on_message(peer, parts)` and `on_lost(peer)` run on the loop; their exceptions are logged.
    `max_message_bytes` bounds one part, `max_queue_bytes` the queue of one peer; libzmq may hold
    `high_water_mark` messages more per peer and direction.  With `zero_copy`, parts from
    `ZERO_COPY_BYTES` on are memoryviews of libzmq's memory or of the caller's.  A message of more
    than 64 parts arrives as [].
    """

    def __init__(
        self,
        on_message: Callable[[bytes, list[Buffer]], None],
        *,
        on_lost: Callable[[bytes], None] | None = None,
        zero_copy: bool = False,
        max_message_bytes: int = 8 << 20,
        max_queue_bytes: int = 64 << 20,
        high_water_mark: int = 1000,
        context: Context | None = None,
        keys: Keys | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self._traffic = traffic or Traffic()
        self._on_message = guarded(on_message)
        self._keys = keys
        self._port = Port(
            context,
            zmq.ROUTER,
            limits := Limits(max_message_bytes, max_queue_bytes),
            high_water_mark,
            zero_copy=zero_copy,
            security={} if keys is None else server_options(keys.pair),
        )
        self._gate: Gate | None = None
        if keys is not None:
            self._gate = Gate(self._port.context, keys, lambda: self._pump.read_events())
        self._unauthenticated = UnauthenticatedConnections(lambda: self._pump.read_events(), cut)
        self._peers = Peers(limits, self._port.transmit, guarded(on_lost))
        self._pump = Pump(
            self._port, self._receive, self._notice, self._peers.settle, self._peers.flush
        )

    @property
    def peers(self) -> list[bytes]:
        """The peers that can be sent to."""
        return self._peers.reachable

    def bind(self, endpoint: str) -> str:
        """Listen and return the endpoint with its actual port.  Raises OSError or ConfigError."""
        if self._gate is not None and self._keys is not None:
            prove(self._port, self._keys, self._gate.authenticator)
        return self._port.attach("bind", endpoint)

    def send(self, peer: bytes, parts: Sequence[Buffer], *, track: bool = False) -> Sending | None:
        """Send now, or queue if `peer` cannot take it; never wait.

        Raises PeerLost for an unknown peer, WireError (OVERLOADED) for a full queue, and
        LocalProtocolError for a part over `max_message_bytes`.
        """
        self._pump.wake()
        try:
            sending = self._peers.send(peer, parts, track=track)
        except WireError as error:
            self._traffic.drop(error)
            raise
        self._traffic.count_sent(parts)
        return sending

    def queued_bytes(self, peer: bytes) -> int:
        """Bytes that wait here for `peer`, 0 for an unknown one."""
        return self._peers.queued_bytes(peer)

    def forget(self, peer: bytes) -> None:
        """Drop the queue of `peer`; its next message makes it known again."""
        self._peers.forget(peer)

    async def close(self, linger_s: float = 0.0) -> None:
        """Send queued messages for up to `linger_s` seconds, then close.  Calls no handler."""
        if self._gate is not None:
            self._gate.close()
        await self._pump.close(linger_s)
        self._peers.clear()

    def _receive(self) -> int | None:
        try:
            peer = self._port.socket.recv(LAST)
        except zmq.Again:
            return None
        frame = self._port.socket.recv(LAST, copy=False)
        if not self._peers.knows(peer):
            self._pump.read_events()
            try:
                fd = int(frame.get(zmq.SRCFD))
            except zmq.ZMQError:  # of ZMTP 1 or 2, which bytes at random may look like
                return self._port.read(frame)[1]
            if not self._may_speak(peer, frame, fd):
                return self._port.read(frame)[1]
            self._peers.meet(peer, fd)
        parts, num_bytes = self._port.read(frame)
        self._traffic.count_received(parts)
        self._on_message(peer, parts)
        return num_bytes

    def _may_speak(self, peer: bytes, frame: zmq.Frame, fd: int) -> bool:
        if self._gate is None:
            return True
        self._unauthenticated.remove(fd)
        public = str(frame.get("User-Id"))
        return self._gate.admit(peer, public, fd, is_live=self._peers.is_live(fd))

    def _notice(self, event: tuple[int, int]) -> None:
        kind, fd = event
        if kind == zmq.EVENT_ACCEPTED:
            self._peers.open(fd)
            if self._gate is not None:
                self._unauthenticated.add(fd)
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._unauthenticated.drop_oldest()
        elif kind == zmq.EVENT_DISCONNECTED:
            self._peers.close(fd)
            self._unauthenticated.remove(fd)
            if self._gate is not None:
                self._gate.remove(fd)


class Link:
    """A connected DEALER: reconnects to `endpoint` for as long as the link is open.

    `on_up()` is called at each completed handshake, and its messages go first; `on_down()` when
    that connection ends.  Bounds and handlers as in `Hub`.  With `keys`, the other end must be the
    party `server`, whose key must be known (or ConfigError).
    """

    def __init__(
        self,
        identity: bytes,
        endpoint: str,
        on_message: Callable[[list[Buffer]], None],
        *,
        on_up: Callable[[], None] | None = None,
        on_down: Callable[[], None] | None = None,
        zero_copy: bool = False,
        max_message_bytes: int = 8 << 20,
        max_queue_bytes: int = 64 << 20,
        high_water_mark: int = 1000,
        context: Context | None = None,
        keys: Keys | None = None,
        server: str = "router",
        traffic: Traffic | None = None,
    ) -> None:
        self._traffic = traffic or Traffic()
        self.endpoint, self.is_up, self._has_keys = endpoint, False, keys is not None
        self._on_message = guarded(on_message)
        self._on_up, self._on_down = guarded(on_up), guarded(on_down)
        self._events: list[tuple[int, int]] = []
        self._is_greeting = self._was_refused = False
        self._port = Port(
            context,
            zmq.DEALER,
            limits := Limits(max_message_bytes, max_queue_bytes),
            high_water_mark,
            zero_copy=zero_copy,
            security=link_options(keys, server),
        )
        self._port.socket.setsockopt(zmq.ROUTING_ID, identity)
        self._port.attach("connect", endpoint)
        self._outbox = Outbox(endpoint, limits, partial(self._port.transmit, b""))
        later = asyncio.get_running_loop().call_later
        self._reconnect = Reconnect(partial(self._port.connect_again, endpoint), later)
        self._pump = Pump(self._port, self._receive, self._events.append, self._settle, self._flush)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait here."""
        return self._outbox.num_bytes

    def send(self, parts: Sequence[Buffer], *, track: bool = False) -> Sending | None:
        """Send now, or queue while the peer is full or the connection not up; never wait.

        Raises:
            PeerLost: The link is closed.  Else as `Hub.send`.
        """
        try:
            if self._pump.is_closed:
                raise PeerLost(self.endpoint)
            self._pump.wake()
            now = self.is_up and (not self._outbox or self._is_greeting)
            sending = self._outbox.send(parts, track=track, now=now)
        except WireError as error:
            self._traffic.drop(error)
            raise
        self._traffic.count_sent(parts)
        return sending

    async def close(self, linger_s: float = 0.0) -> None:
        """As `Hub.close`."""
        self._reconnect.stop()
        await self._pump.close(linger_s)
        self.is_up = False
        self._outbox.drop()

    def _receive(self) -> int | None:
        try:
            frame = self._port.socket.recv(LAST, copy=False)
        except zmq.Again:
            return None
        parts, num_bytes = self._port.read(frame)
        self._traffic.count_received(parts)
        self._on_message(parts)
        return num_bytes

    def _settle(self) -> None:
        while self._events:
            kind, _ = self._events.pop(0)
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_up, self._is_greeting, self._was_refused = True, True, False
                self._reconnect.succeed()
                self._on_up()
                self._is_greeting = False
            elif kind & ENDED:
                self._end()
            elif kind & REFUSED and not self._was_refused:
                self._was_refused = True
                self._say_refused()

    def _say_refused(self) -> None:
        if self._has_keys:
            _LOG.error("refused: are its keys and ours in both authorized_keys?", by=self.endpoint)
        else:
            _LOG.warning("hung up on: does it ask for keys, or is it stopping?", by=self.endpoint)

    def _end(self) -> None:
        self._reconnect.fail()
        if self.is_up:
            self.is_up = False
            self._outbox.drop()
            self._on_down()

    def _flush(self) -> float | None:
        return self._outbox.flush() if self.is_up else None
