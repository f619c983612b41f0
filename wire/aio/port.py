"""One ZeroMQ socket with its options and its monitor; its calls never block.

`wire.aio.pump` runs it; `wire.aio.zmq` gives it a role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from wire.aio import sockopts
from wire.aio.outbox import MAX_PARTS, Limits, Sending, Tracker, size_of
from wire.parts import Buffer
from wire.process.keys import KeyPair, Keys

Context = zmq.Context[zmq.Socket[bytes]]
# From this size on, handing a buffer over is cheaper than copying it (pyzmq's own threshold).
ZERO_COPY_BYTES: Final = 64 << 10
ZAP_DOMAIN: Final = b"baton"
# Plain numbers: the flags of pyzmq are enums, whose operators cost more than a call.
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
LAST, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
REFUSED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
# A connection ended, or did not even begin.
ENDED: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | ENDED | REFUSED
Options = Mapping[str, int | bytes]


async def terminate(context: Context) -> None:
    """End a context whose sockets are closed; their linger is waited for off the loop."""
    await asyncio.get_running_loop().run_in_executor(None, context.term)


def new_key_pair() -> KeyPair:
    """Make a CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def server_options(pair: KeyPair) -> Options:
    """Options of a bound socket that admits whom the authenticator of its context knows.

    Without an authenticator for the domain in that very context it admits nobody.
    """
    return {
        "CURVE_SERVER": 1,
        "CURVE_PUBLICKEY": pair.public.encode(),
        "CURVE_SECRETKEY": pair.secret.encode(),
        "ZAP_DOMAIN": ZAP_DOMAIN,
        "ZAP_ENFORCE_DOMAIN": 1,
    }


def client_options(pair: KeyPair, server: str) -> Options:
    """Options of a socket that connects to whoever has the secret of the public key `server`."""
    return {
        "CURVE_SERVERKEY": server.encode(),
        "CURVE_PUBLICKEY": pair.public.encode(),
        "CURVE_SECRETKEY": pair.secret.encode(),
    }


def link_options(keys: Keys | None, server: str) -> Options:
    """Options of a link to the party `server`; none without keys.  Raises ConfigError."""
    return {} if keys is None else client_options(keys.pair, keys.public_of(server))


class Port:
    """A socket and its monitor.  `zero_copy`: large parts cross it without a copy.

    Raises OSError when there are too many sockets.
    """

    def __init__(
        self,
        context: Context | None,
        kind: int,
        limits: Limits,
        hwm: int,
        *,
        zero_copy: bool,
        security: Options,
    ) -> None:
        self.context, self._owns_context = context or Context(), context is None
        try:
            self.socket: zmq.Socket[bytes] = self.context.socket(kind)
        except zmq.ZMQError as error:  # there are too many
            raise OSError(error.errno, f"cannot open a socket: {error.strerror}") from error
        bounds = {"MAXMSGSIZE": limits.part_bytes, "SNDHWM": hwm, "RCVHWM": hwm}
        role = sockopts.ROUTER if kind == zmq.ROUTER else sockopts.DEALER
        for name, value in {**bounds, **sockopts.COMMON, **role, **security}.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self._monitor = self.socket.get_monitor_socket(_EVENTS)
        self._least = ZERO_COPY_BYTES if zero_copy else 1 << 62

    @property
    def fds(self) -> tuple[int, int]:
        return int(self.socket.FD), int(self._monitor.FD)

    def is_readable(self) -> bool:
        return bool(int(self.socket.getsockopt(EVENTS)) & POLLIN)

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
            await terminate(self.context)

    def attach(self, verb: Literal["bind", "connect"], endpoint: str) -> str:
        """Bind or connect; return the actual endpoint.  Raises OSError, naming it."""
        try:
            getattr(self.socket, verb)(endpoint)
        except zmq.ZMQError as error:
            if verb == "connect":
                self.shut(0.0)
                if self._owns_context:
                    self.context.term()
            raise OSError(error.errno, f"cannot {verb} {endpoint}: {error.strerror}") from error
        return bytes(self.socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def connect_again(self, endpoint: str) -> None:
        """Connect to where a connection has ended."""
        with suppress(zmq.ZMQError):  # after a handshake libzmq has forgotten it by itself
            self.socket.disconnect(endpoint)
        self.socket.connect(endpoint)

    def read(self, frame: zmq.Frame) -> tuple[list[Buffer], int]:
        """Return the parts of the message `frame` begins, and their bytes; none if too many."""
        parts, num_bytes = list[Buffer](), 0
        while True:
            num_bytes += len(frame)
            if len(parts) <= MAX_PARTS:
                parts.append(frame.bytes if len(frame) < self._least else frame.buffer)
            if not frame.more:
                return parts if len(parts) <= MAX_PARTS else [], num_bytes
            frame = self.socket.recv(LAST, copy=False)

    def transmit(self, route: bytes, parts: Sequence[Buffer], sending: Sending | None) -> None:
        """Hand one message to libzmq (see `outbox.Transmit`); a ROUTER puts `route` first."""
        trackers: list[Tracker] = []
        last = len(parts) - 1
        if route:
            try:
                self.socket.send(route, MORE)
            except zmq.ZMQError as error:
                kind = BlockingIOError if error.errno == zmq.EAGAIN else ConnectionError
                raise kind(error.strerror) from None
        for i, part in enumerate(parts):
            flags = MORE if i < last else LAST
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
