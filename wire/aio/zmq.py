"""ZeroMQ on the event loop: `Hub`, a bound ROUTER, and `Link`, a connected DEALER.  SPEC 2.1.

Sockets never block: `wire.aio.pump` runs them, and messages for a slow peer are queued in its
`wire.aio.outbox`, up to a limit in bytes.  `on_lost` is called after a peer's last message.  A peer
that vanishes without closing TCP is detected after 25 to 30 s, so callers send heartbeats.  ZeroMQ
ignores a second connection with a connected identity, so identities contain the process's epoch.

With keys, all traffic is encrypted (CURVE): a hub admits peers that `wire.aio.zap` authenticates,
and a link connects to one peer, named by `server`.  Use sockets only on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import socket
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
    """A bound ROUTER for many peers, each registered by its routing id at its first message.

    `on_message(peer, parts)` and `on_lost(peer)` run on the event loop; their exceptions are
    logged.  `max_message_bytes` limits one part, `max_queue_bytes` the send queue of one peer;
    libzmq may buffer `high_water_mark` messages more per peer and direction.  With `zero_copy`,
    parts of at least `ZERO_COPY_BYTES` are received as memoryviews of libzmq's memory, and sent
    without copying.  A message of more than 64 parts is delivered as [].
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
        # The listening socket, and a copy of it while it does not accept.
        self._listener = -1
        self._kept: int | None = None
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
            self._port, self._receive, self._notice, self._peers.report_lost, self._peers.flush
        )

    @property
    def peers(self) -> list[bytes]:
        """The connected peers."""
        return self._peers.reachable

    def bind(self, endpoint: str, listener: int | None = None) -> str:
        """Listen, and return the endpoint with its actual port.  Raises OSError or ConfigError.

        With `listener`, the descriptor of a listening socket, use and own that one.
        """
        if self._gate is not None and self._keys is not None:
            prove(self._port, self._keys, self._gate.authenticator)
        if listener is not None:
            return self._port.adopt(listener, endpoint)
        return self._port.attach("bind", endpoint)

    @property
    def listener(self) -> int:
        """The descriptor of the listening socket, to inherit by another process."""
        self._pump.read_events()
        return self._listener

    def stop_accepting(self) -> None:
        """Leave new connections to a process that has inherited the listening socket.

        `unbind` would end the connections that libzmq has accepted.  So its descriptor gets another
        socket, to which nobody connects; libzmq closes the descriptor when the hub is closed.
        """
        if self._kept is None:
            listener = self.listener
            self._kept = os.dup(listener)
            with socket.create_server(("127.0.0.1", 0)) as idle:
                idle.setblocking(False)
                os.dup2(idle.fileno(), listener, inheritable=False)

    def accept_again(self) -> None:
        """Undo `stop_accepting`."""
        if self._kept is not None:
            # With its own socket again, libzmq can remove the descriptor from its poller.
            os.dup2(self._kept, self._listener, inheritable=False)
            os.close(self._kept)
            self._kept = None

    def send(self, peer: bytes, parts: Sequence[Buffer], *, track: bool = False) -> Sending | None:
        """Send a message now, or queue it if the socket is full; never wait.

        With `track`, returns a `Sending` that reports when the buffers may be reused.  Raises
        PeerLost for an unknown peer, WireError (OVERLOADED) for a full queue, and
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
        """Return the size of the queue for `peer` in bytes, 0 for an unknown peer."""
        return self._peers.queued_bytes(peer)

    def forget(self, peer: bytes) -> None:
        """Remove `peer` and drop its queue.  Its next message registers it again."""
        self._peers.forget(peer)

    async def close(self, linger_s: float = 0.0) -> None:
        """Flush queued messages for up to `linger_s` seconds, then close.  Calls no handler."""
        self.accept_again()
        if self._gate is not None:
            self._gate.close()
        await self._pump.close(linger_s)
        self._peers.clear()

    def _receive(self) -> int | None:
        """Read one message, register its peer if new, and deliver it; return its size or None."""
        try:
            peer = self._port.socket.recv(LAST)
        except zmq.Again:
            return None
        frame = self._port.socket.recv(LAST, copy=False)
        if not self._peers.is_registered(peer):
            self._pump.read_events()
            try:
                fd = int(frame.get(zmq.SRCFD))
            except zmq.ZMQError:  # ZMTP 1 or 2, or random bytes that look like it
                return self._port.read(frame)[1]
            if not self._is_authorized(peer, frame, fd):
                return self._port.read(frame)[1]
            self._peers.register(peer, fd)
        parts, num_bytes = self._port.read(frame)
        self._traffic.count_received(parts)
        self._on_message(peer, parts)
        return num_bytes

    def _is_authorized(self, peer: bytes, frame: zmq.Frame, fd: int) -> bool:
        if self._gate is None:
            return True
        self._unauthenticated.remove(fd)
        public = str(frame.get("User-Id"))
        return self._gate.admit(peer, public, fd, is_live=self._peers.is_live(fd))

    def _notice(self, event: tuple[int, int]) -> None:
        kind, fd = event
        if kind == zmq.EVENT_LISTENING:
            self._listener = fd
        elif kind == zmq.EVENT_ACCEPTED:
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
    """A connected DEALER that reconnects to `endpoint` until it is closed.

    `on_up()` is called after each completed handshake; messages sent in it precede queued ones.
    `on_down()` is called when that connection ends.  For limits and other handlers see `Hub`.  With
    `keys`, the peer must have the key of `server`; raises ConfigError if that is not in the list.
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
        """Size of the send queue in bytes."""
        return self._outbox.num_bytes

    def send(self, parts: Sequence[Buffer], *, track: bool = False) -> Sending | None:
        """Send a message now, or queue it if the socket is full or not connected; never wait.

        Raises:
            PeerLost: The link is closed.  For other errors see `Hub.send`.
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
        """Flush queued messages for up to `linger_s` seconds, then close.  Calls no handler."""
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
