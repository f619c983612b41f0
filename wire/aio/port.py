"""A non-blocking ZeroMQ socket with its options and its monitor.

`wire.aio.pump` runs its reads and writes; `wire.aio.zmq` uses it as ROUTER or DEALER.
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
# From this size on, zero copy is cheaper than copying a buffer (pyzmq's own threshold).
ZERO_COPY_BYTES: Final = 64 << 10
ZAP_DOMAIN: Final = b"baton"
# Plain integers, because operators on pyzmq's enum flags are slower than a function call.
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
LAST, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
REFUSED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
# A connection ended, or could not be established.
ENDED: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_EVENTS: Final = (
    zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | ENDED | REFUSED
)
Options = Mapping[str, int | bytes]


async def terminate(context: Context) -> None:
    """Terminate a context whose sockets are closed, waiting for their linger in a thread."""
    await asyncio.get_running_loop().run_in_executor(None, context.term)


def new_key_pair() -> KeyPair:
    """Generate a CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def public_key(secret: str) -> str:
    """Return the public key of a secret CURVE key; both in Z85."""
    return zmq.curve_public(secret.encode()).decode()


def server_options(pair: KeyPair) -> Options:
    """Return the options of a bound socket that only admits keys its authenticator accepts.

    Without an authenticator (`wire.aio.zap`) in the same context, it admits nobody.
    """
    return {
        "CURVE_SERVER": 1,
        "CURVE_PUBLICKEY": pair.public.encode(),
        "CURVE_SECRETKEY": pair.secret.encode(),
        "ZAP_DOMAIN": ZAP_DOMAIN,
        "ZAP_ENFORCE_DOMAIN": 1,
    }


def client_options(pair: KeyPair, server: str) -> Options:
    """Return the options of a socket that only connects to the owner of public key `server`."""
    return {
        "CURVE_SERVERKEY": server.encode(),
        "CURVE_PUBLICKEY": pair.public.encode(),
        "CURVE_SECRETKEY": pair.secret.encode(),
    }


def link_options(keys: Keys | None, server: str) -> Options:
    """Return the options of a link to `server` (`router` or `<role>-<rank>`); {} without keys."""
    return {} if keys is None else client_options(keys.pair, keys.public_of(server))


class Port:
    """A ZeroMQ socket and its monitor.  With `zero_copy`, large parts are not copied.

    Raises OSError if there are too many sockets.
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
        except zmq.ZMQError as error:  # too many sockets
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
        """Bind or connect, and return the endpoint with its actual port.  Raises OSError."""
        try:
            getattr(self.socket, verb)(endpoint)
        except zmq.ZMQError as error:
            if verb == "connect":
                self.shut(0.0)
                if self._owns_context:
                    self.context.term()
            raise OSError(error.errno, f"cannot {verb} {endpoint}: {error.strerror}") from error
        return bytes(self.socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def adopt(self, listener: int, endpoint: str) -> str:
        """Bind to a listening socket, whose descriptor this takes; return its endpoint."""
        self.socket.setsockopt(zmq.USE_FD, listener)
        bound = self.attach("bind", endpoint)
        self.socket.setsockopt(zmq.USE_FD, -1)
        return bound

    def connect_again(self, endpoint: str) -> None:
        """Reconnect to an endpoint after its connection has ended."""
        # libzmq disconnects by itself if the handshake had succeeded.
        with suppress(zmq.ZMQError):
            self.socket.disconnect(endpoint)
        self.socket.connect(endpoint)

    def read(self, frame: zmq.Frame) -> tuple[list[Buffer], int]:
        """Read the rest of a message; return its parts ([] if too many) and its size in bytes."""
        parts, num_bytes = list[Buffer](), 0
        while True:
            num_bytes += len(frame)
            if len(parts) <= MAX_PARTS:
                parts.append(frame.bytes if len(frame) < self._least else frame.buffer)
            if not frame.more:
                return parts if len(parts) <= MAX_PARTS else [], num_bytes
            frame = self.socket.recv(LAST, copy=False)

    def transmit(self, route: bytes, parts: Sequence[Buffer], sending: Sending | None) -> None:
        """Pass one message to libzmq (see `outbox.Transmit`); `route` is empty for a DEALER."""
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
                    # The tracker of a multipart message covers only its last frame: track each.
                    frame = zmq.Frame(part, track=True, copy=False)
                    trackers.append(frame.tracker)
                    self.socket.send(frame, flags, copy=False, track=True)
                else:  # without a Sending, only immutable buffers may be shared with libzmq
                    self.socket.send(part, flags, copy=not isinstance(part, bytes))
            except zmq.Again:
                if i == 0 and not route:
                    raise BlockingIOError from None
                # The connection ended inside the message; libzmq drops its remaining parts.
        if sending is not None:
            sending.hand_over(trackers)
