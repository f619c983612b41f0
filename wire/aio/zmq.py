"""ZeroMQ on the event loop: `Hub`, a bound ROUTER, and `Link`, a connected DEALER.  SPEC 2.1.

Strategy: plain sockets that never block, run by `wire.aio.pump`; what a peer cannot take waits in
its `wire.aio.outbox`, because libzmq's high-water mark counts messages and ours counts bytes.

A closed connection is traced to its peer (`wire.aio.peers`), and `on_lost` follows the peer's last
message.  A peer that vanishes without closing TCP is noticed only after 25 to 30 s: heartbeats are
the caller's business.  A second connection with an identity already connected is never heard (no
take-over), hence identities carry the epoch of their process.

Sockets belong to the loop's thread.  Encryption and the meaning of parts are not handled here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from wire.aio import sockopts
from wire.aio.outbox import MAX_PARTS, Limits, Outbox, Sending, Tracker, size_of
from wire.aio.peers import Peers
from wire.aio.pump import Pump, guarded
from wire.errors import PeerLost
from wire.parts import Buffer

__all__ = ["Context", "Hub", "Link", "Sending", "terminate"]

Context = zmq.Context[zmq.Socket[bytes]]
# From this size on, handing a buffer over is cheaper than copying it (pyzmq's own threshold).
ZERO_COPY_BYTES: Final = 64 << 10
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


async def terminate(context: Context) -> None:
    """End a context whose sockets are closed; their linger is waited for off the loop."""
    await asyncio.get_running_loop().run_in_executor(None, context.term)


class _Port:
    """A socket and its monitor.  `zero_copy`: large parts cross it without a copy."""

    def __init__(
        self, context: Context | None, kind: int, limits: Limits, hwm: int, *, zero_copy: bool
    ) -> None:
        self._context, self._owns_context = context or Context(), context is None
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        options = {"MAXMSGSIZE": limits.part_bytes, "SNDHWM": hwm, "RCVHWM": hwm} | sockopts.COMMON
        options |= sockopts.ROUTER if kind == zmq.ROUTER else sockopts.DEALER
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self._monitor = self.socket.get_monitor_socket(_EVENTS)
        self._least = ZERO_COPY_BYTES if zero_copy else 1 << 62

    @property
    def fds(self) -> tuple[int, int]:
        return int(self.socket.FD), int(self._monitor.FD)

    def is_readable(self) -> bool:
        return bool(int(self.socket.EVENTS) & zmq.POLLIN)

    def events(self) -> list[tuple[int, int]]:
        events: list[tuple[int, int]] = []
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                events.append((int(event["event"]), int(event["value"])))
        return events

    def shut(self, linger_s: float) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(int(linger_s * 1000))

    async def close(self, linger_s: float) -> None:
        self.shut(linger_s)
        if self._owns_context:
            await terminate(self._context)

    def attach(self, verb: Literal["bind", "connect"], endpoint: str) -> str:
        """Bind or connect; return the actual endpoint.  Raises OSError, naming it."""
        try:
            getattr(self.socket, verb)(endpoint)
        except zmq.ZMQError as error:
            if verb == "connect":
                self.shut(0.0)
                if self._owns_context:
                    self._context.term()
            raise OSError(error.errno, f"cannot {verb} {endpoint}: {error.strerror}") from error
        return bytes(self.socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def read(self, frame: zmq.Frame) -> tuple[list[Buffer], int]:
        """Return the parts of the message `frame` begins, and their bytes; none if too many."""
        parts, num_bytes = list[Buffer](), 0
        while True:
            num_bytes += len(frame)
            if len(parts) <= MAX_PARTS:
                parts.append(frame.bytes if len(frame) < self._least else frame.buffer)
            if not frame.more:
                return parts if len(parts) <= MAX_PARTS else [], num_bytes
            frame = self.socket.recv(_LAST, copy=False)

    def transmit(self, route: bytes, parts: Sequence[Buffer], sending: Sending | None) -> None:
        """Hand one message to libzmq (see `outbox.Transmit`); a ROUTER puts `route` first."""
        trackers: list[Tracker] = []
        last = len(parts) - 1
        if route:
            try:
                self.socket.send(route, _MORE)
            except zmq.ZMQError as error:
                kind = BlockingIOError if error.errno == zmq.EAGAIN else ConnectionError
                raise kind(error.strerror) from None
        for i, part in enumerate(parts):
            flags = _MORE if i < last else _LAST
            try:
                if size_of(part) < self._least:
                    self.socket.send(part, flags)
                elif sending is not None:
                    # The tracker of a multipart message covers its last frame only: track each.
                    frame = zmq.Frame(part, track=True, copy=False)
                    trackers.append(frame.tracker)
                    self.socket.send(frame, flags, copy=False, track=True)
                else:  # without a Sending, only what cannot change may be lent to libzmq
                    self.socket.send(part, flags, copy=not isinstance(part, bytes))
            except zmq.Again:
                if i == 0 and not route:
                    raise BlockingIOError from None
                # The connection ended inside the message; libzmq drops the parts that follow.
        if sending is not None:
            sending.hand_over(trackers)


class Hub:
    """A bound ROUTER: many peers, each known by its routing id from its first message on.

    `on_message(peer, parts)` and `on_lost(peer)` run on the loop; an exception in one is logged.
    `max_message_bytes` bounds one part, `max_queue_bytes` what waits for one peer here; libzmq may
    hold `high_water_mark` messages more per peer and direction.  With `zero_copy`, parts from
    `ZERO_COPY_BYTES` on arrive as memoryviews of libzmq's memory and leave from the caller's.
    A message of more than 64 parts arrives as [].
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
    ) -> None:
        self._on_message = guarded(on_message)
        limits = Limits(max_message_bytes, max_queue_bytes)
        self._port = _Port(context, zmq.ROUTER, limits, high_water_mark, zero_copy=zero_copy)
        self._peers = Peers(limits, self._port.transmit, guarded(on_lost))
        self._pump = Pump(
            self._port, self._receive, self._notice, self._peers.settle, self._peers.flush
        )

    @property
    def peers(self) -> list[bytes]:
        """The peers that can be sent to."""
        return self._peers.reachable

    def bind(self, endpoint: str) -> str:
        """Listen and return the endpoint with its actual port.  Raises OSError, naming it."""
        return self._port.attach("bind", endpoint)

    def send(self, peer: bytes, parts: Sequence[Buffer], *, track: bool = False) -> Sending | None:
        """Send now, or queue if `peer` cannot take it; never wait.

        Raises:
            PeerLost: No connection to `peer`, or not a message of it yet.
            WireError: OVERLOADED, its queue is full.
            LocalProtocolError: A part is over `max_message_bytes`.
        """
        self._pump.wake()
        return self._peers.send(peer, parts, track=track)

    def queued_bytes(self, peer: bytes) -> int:
        """Bytes that wait here for `peer`, 0 for an unknown one."""
        return self._peers.queued_bytes(peer)

    def forget(self, peer: bytes) -> None:
        """Drop what waits for `peer` and treat it as unknown; its next message makes it known."""
        self._peers.forget(peer)

    async def close(self, linger_s: float = 0.0) -> None:
        """Send what waits for up to `linger_s` seconds, then close.  Calls no handler."""
        await self._pump.close(linger_s)
        self._peers.clear()

    def _receive(self) -> int | None:
        try:
            peer = self._port.socket.recv(_LAST)
        except zmq.Again:
            return None
        frame = self._port.socket.recv(_LAST, copy=False)
        if not self._peers.knows(peer):
            self._pump.read_events()
            self._peers.meet(peer, int(frame.get(zmq.SRCFD)))
        parts, num_bytes = self._port.read(frame)
        self._on_message(peer, parts)
        return num_bytes

    def _notice(self, event: tuple[int, int]) -> None:
        kind, fd = event
        if kind == zmq.EVENT_ACCEPTED:
            self._peers.open(fd)
        elif kind == zmq.EVENT_DISCONNECTED:
            self._peers.close(fd)


class Link:
    """A connected DEALER: one peer, `endpoint`, reconnected to for as long as the link is open.

    `on_up()` is called at each completed handshake and what it sends goes first; `on_down()` when
    that connection ends.  Bounds and handlers as in `Hub`.
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
    ) -> None:
        self.endpoint, self.is_up = endpoint, False
        self._on_message = guarded(on_message)
        self._on_up, self._on_down = guarded(on_up), guarded(on_down)
        self._events: list[tuple[int, int]] = []
        self._is_greeting = False
        limits = Limits(max_message_bytes, max_queue_bytes)
        self._port = _Port(context, zmq.DEALER, limits, high_water_mark, zero_copy=zero_copy)
        self._port.socket.setsockopt(zmq.ROUTING_ID, identity)
        self._port.attach("connect", endpoint)
        self._outbox = Outbox(endpoint, limits, partial(self._port.transmit, b""))
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
        if self._pump.is_closed:
            raise PeerLost(self.endpoint)
        self._pump.wake()
        now = self.is_up and (not self._outbox or self._is_greeting)
        return self._outbox.send(parts, track=track, now=now)

    async def close(self, linger_s: float = 0.0) -> None:
        """As `Hub.close`."""
        await self._pump.close(linger_s)
        self.is_up = False
        self._outbox.drop()

    def _receive(self) -> int | None:
        try:
            frame = self._port.socket.recv(_LAST, copy=False)
        except zmq.Again:
            return None
        parts, num_bytes = self._port.read(frame)
        self._on_message(parts)
        return num_bytes

    def _settle(self) -> None:
        while self._events:
            kind, _ = self._events.pop(0)
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_up = self._is_greeting = True
                self._on_up()
                self._is_greeting = False
            elif kind == zmq.EVENT_DISCONNECTED and self.is_up:
                self.is_up = False
                self._outbox.drop()
                self._on_down()

    def _flush(self) -> float | None:
        return self._outbox.flush() if self.is_up else None
