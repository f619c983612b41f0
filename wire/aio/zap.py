"""Admission at a bound ZeroMQ socket: ZAP (ZeroMQ RFC 27), answered by its `Door`.

libzmq asks at every handshake, over an in-process socket of the same context; a socket that finds
nobody there admits nobody (ZAP_ENFORCE_DOMAIN).  `prove` shows that before a port is opened.

Authentication ends with the handshake, so `Gate` goes on: the first message of a peer must come
under an identity that who was admitted may use, and who is no longer known loses its connections.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from wire.aio.port import (
    LAST,
    REFUSED,
    ZAP_DOMAIN,
    Context,
    Options,
    Port,
    client_options,
    new_key_pair,
    server_options,
)
from wire.identity import is_of_party
from wire.process.keys import Keys
from wire.process.settings import ConfigError

ENDPOINT: Final = "inproc://zeromq.zap.01"
# How often the list of keys is looked at: a revoked key loses its connections within this.
REFRESH_S: Final = 1.0
PROBE_S: Final = 5.0
_LOG: Final = structlog.get_logger(__name__)


class Door(Protocol):
    """Says who may come in at one kind of socket.

    Attributes:
        mechanism: How they show who they are, as ZAP names it.
        secret: What they need for it, in a word.
        options: Of the bound socket.
    """

    mechanism: bytes
    secret: str
    options: Options

    def admit(self, credentials: list[bytes]) -> str:
        """Return under which name who shows these goes on, "" for nobody."""
        ...

    def may_speak(self, name: str, peer: bytes) -> bool:
        """Whether who was admitted under this name may use the identity `peer`, still."""
        ...

    def refresh(self) -> None:
        """Look again at who is known."""
        ...

    def stranger(self) -> Options:
        """Return the options of a socket of somebody who is not known."""
        ...


class KeyDoor:
    """Admits who has a key of the list."""

    mechanism, secret = b"CURVE", "key"

    def __init__(self, keys: Keys) -> None:
        self.options = server_options(keys.pair)
        self._keys = keys

    def admit(self, credentials: list[bytes]) -> str:
        self._keys.refresh()
        public = z85.encode(credentials[0]).decode()
        return "" if self._keys.party(public) is None else public

    def may_speak(self, name: str, peer: bytes) -> bool:
        party = self._keys.party(name)
        return party is not None and is_of_party(peer, party)

    def refresh(self) -> None:
        self._keys.refresh()

    def stranger(self) -> Options:
        return client_options(new_key_pair(), self._keys.pair.public)


class Authenticator:
    """Answers libzmq's questions for one context, on the running loop, until closed."""

    def __init__(
        self,
        context: Context,
        door: Door,
        domain: bytes = ZAP_DOMAIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_refused = 0
        self.is_proving = False  # by `prove`: that it is refused is no news
        self.door, self._domain, self._clock = door, domain, clock
        self._quiet_until = 0.0
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._fd = int(self._socket.FD)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self.turn)

    def turn(self) -> None:
        """Answer everything that was asked.  The descriptor is edge-triggered: read until empty."""
        with suppress(zmq.Again):
            while not self._socket.closed:
                request = self._socket.recv_multipart(LAST)
                self._socket.send_multipart(self._answer(request), LAST)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id, domain, address, _, mechanism, *credentials = request
        reason, name = "", ""
        if domain != self._domain:
            reason = "wrong domain"
        elif mechanism != self.door.mechanism or not credentials:
            reason = f"no {self.door.mechanism.decode()}"
        elif not (name := self.door.admit(credentials)):
            reason = f"unknown {self.door.secret}"
        if reason:
            if not self.is_proving:
                self._note(address, reason)
            return [version, request_id, b"400", b"refused", b"", b""]
        return [version, request_id, b"200", b"OK", name.encode(), b""]

    def _note(self, address: bytes, reason: str) -> None:
        """Log a refusal, at most one a second: whoever is refused must not fill the disk."""
        self.num_refused += 1
        now = self._clock()
        if now >= self._quiet_until:
            self._quiet_until = now + 1.0
            _LOG.warning(
                "connection refused",
                address=address.decode("ascii", "replace")[:64],
                reason=reason,
                refused_so_far=self.num_refused,
            )


class Gate:
    """Who is behind the connections of one bound socket, and whether they may still be there.

    `read_events` must call `leave` for every connection that has ended: descriptors are reused, and
    only connections of this socket may be cut.
    """

    def __init__(self, context: Context, door: Door, read_events: Callable[[], None]) -> None:
        self.authenticator = Authenticator(context, door)
        self._door, self._read_events = door, read_events
        # By descriptor: the name it was admitted under, and the identity it uses.
        self._holders: dict[int, tuple[str, bytes]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(REFRESH_S, self._on_timer)

    def admit(self, peer: bytes, name: str, fd: int, *, is_live: bool) -> bool:
        """Whether who was admitted as `name` may speak as `peer`; if not, its connection is cut."""
        is_welcome = self._door.may_speak(name, peer)
        if not is_welcome:
            _LOG.warning("identity of another", peer=repr(peer)[:64], name=name)
        if is_live and is_welcome:
            self._holders[fd] = name, peer
        elif is_live:
            cut(fd)
        return is_welcome

    def leave(self, fd: int) -> None:
        """The connection ended."""
        self._holders.pop(fd, None)

    def close(self) -> None:
        self._timer.cancel()
        self.authenticator.close()

    def cut_revoked(self) -> None:
        """Look again at who is known, and cut connections that may no longer be there."""
        self._door.refresh()
        if self._revoked():
            self._read_events()
        for fd in self._revoked():
            name, _ = self._holders.pop(fd)
            _LOG.warning(f"{self._door.secret} revoked, connection cut", name=name)
            cut(fd)

    def _revoked(self) -> list[int]:
        return [fd for fd, its in self._holders.items() if not self._door.may_speak(*its)]

    def _on_timer(self) -> None:
        self._timer = self._loop.call_later(REFRESH_S, self._on_timer)
        self.cut_revoked()


def prove(port: Port, authenticator: Authenticator, probe_s: float = PROBE_S) -> None:
    """Make sure that `port`, not bound yet, refuses who is not known at the authenticator's door.

    The very socket listens on a loopback port for a moment, and is asked as a stranger would.
    Blocks the loop, at start-up, for milliseconds; for `probe_s` if nobody decides.

    Raises:
        ConfigError: The stranger was admitted, or nobody decided.
    """
    endpoint = port.attach("bind", "tcp://127.0.0.1:*")
    authenticator.is_proving = True
    try:
        event = _knock(endpoint, authenticator.door.stranger(), authenticator.turn, probe_s)
    finally:
        authenticator.is_proving = False
        port.socket.unbind(endpoint)
    if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        what = "admitted" if event else "did not decide on"
        secret = authenticator.door.secret
        raise ConfigError(
            f"not listening: the socket {what} an unknown {secret}, "
            f"so {secret}s would protect nothing"
        )


def _knock(endpoint: str, options: Options, answer: Callable[[], None], probe_s: float) -> int:
    """Connect with these options; return the event that decided, 0 for none in time."""
    with Context() as context:
        stranger = context.socket(zmq.DEALER)
        for name, value in options.items():
            stranger.setsockopt(getattr(zmq, name), value)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)  # it knocks once
        monitor = stranger.get_monitor_socket(REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            stranger.connect(endpoint)
            deadline = time.monotonic() + probe_s
            while time.monotonic() < deadline:
                answer()
                if monitor.poll(5):
                    return int(recv_monitor_message(monitor)["event"])
            return 0
        finally:
            stranger.disable_monitor()
            monitor.close(0)
            stranger.close()


def cut(fd: int) -> None:
    """End a connection that libzmq owns: it finds its socket shut down and lets go of it."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as twin:
        twin.shutdown(socket.SHUT_RDWR)
