"""Authentication at a bound ZeroMQ socket: ZAP (ZeroMQ RFC 27) answered from `wire.process.keys`.

libzmq asks at every CURVE handshake, over an in-process socket of the same context; without an
authenticator there it refuses everybody (ZAP_ENFORCE_DOMAIN).  `prove` tests that before a port is
opened.  After the handshake, `Gate` checks that a peer's identity is one of its key's party, and
cuts the connections of revoked keys.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

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
)
from wire.identity import is_of_party
from wire.process.keys import Keys
from wire.process.settings import ConfigError

ENDPOINT: Final = "inproc://zeromq.zap.01"
# How often the list of keys is looked at: a revoked key loses its connections within this.
REFRESH_S: Final = 1.0
PROBE_S: Final = 5.0
_LOG: Final = structlog.get_logger(__name__)


class Authenticator:
    """Answers libzmq's questions for one context, on the running loop, until closed."""

    def __init__(
        self,
        context: Context,
        keys: Keys,
        domain: bytes = ZAP_DOMAIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_refused = 0
        # The public key that `prove` knocks with: its refusal is no news.
        self.own_stranger: str | None = None
        self._keys, self._domain, self._clock = keys, domain, clock
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
        reason, public = "", ""
        if domain != self._domain:
            reason = "wrong domain"
        elif mechanism != b"CURVE" or len(credentials) != 1:
            reason = "no CURVE"
        else:
            self._keys.refresh()
            public = z85.encode(credentials[0]).decode()
            if self._keys.party(public) is None:
                reason = "unknown key"
        if reason:
            if public != self.own_stranger:
                self._note(address, reason)
            return [version, request_id, b"400", b"refused", b"", b""]
        return [version, request_id, b"200", b"OK", public.encode(), b""]

    def _note(self, address: bytes, reason: str) -> None:
        """Log a refusal, at most one a second: refused peers must not fill the disk."""
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
    """The keys behind the connections of one bound socket, and whether they are still allowed.

    `read_events` must call `remove` for every ended connection: descriptors are reused, and only
    connections of this socket may be cut.
    """

    def __init__(self, context: Context, keys: Keys, read_events: Callable[[], None]) -> None:
        self.authenticator = Authenticator(context, keys)
        self._keys, self._read_events = keys, read_events
        self._holders: dict[int, tuple[str, bytes]] = {}  # descriptor -> public key, identity
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(REFRESH_S, self._on_timer)

    def admit(self, peer: bytes, public: str, fd: int, *, is_live: bool) -> bool:
        """Whether the holder of `public` may speak as `peer`; if not, its connection is cut."""
        is_welcome = self._may_speak(public, peer)
        if not is_welcome:
            party = self._keys.party(public) or "revoked"
            _LOG.warning("identity of another", peer=repr(peer)[:64], party=party)
        if is_live and is_welcome:
            self._holders[fd] = public, peer
        elif is_live:
            cut(fd)
        return is_welcome

    def remove(self, fd: int) -> None:
        """The connection ended."""
        self._holders.pop(fd, None)

    def close(self) -> None:
        self._timer.cancel()
        self.authenticator.close()

    def cut_revoked(self) -> None:
        """Read the list of keys again, and cut the connections that it no longer allows."""
        self._keys.refresh()
        if self._revoked():
            self._read_events()
        for fd in self._revoked():
            public, _ = self._holders.pop(fd)
            _LOG.warning("key revoked, connection cut", public_key=public)
            cut(fd)

    def _revoked(self) -> list[int]:
        return [fd for fd, its in self._holders.items() if not self._may_speak(*its)]

    def _may_speak(self, public: str, peer: bytes) -> bool:
        party = self._keys.party(public)
        return party is not None and is_of_party(peer, party)

    def _on_timer(self) -> None:
        self._timer = self._loop.call_later(REFRESH_S, self._on_timer)
        self.cut_revoked()


def prove(port: Port, keys: Keys, authenticator: Authenticator, probe_s: float = PROBE_S) -> None:
    """Make sure that `port`, not bound yet, refuses an unknown key.

    The very socket listens on a loopback port for a moment, and is asked as a stranger would.
    Blocks the loop, at start-up, for milliseconds; for `probe_s` if nobody decides.  Raises
    ConfigError: the stranger was admitted, or nobody decided.
    """
    stranger = new_key_pair()
    authenticator.own_stranger = stranger.public
    endpoint = port.attach("bind", "tcp://127.0.0.1:*")
    try:
        options = client_options(stranger, keys.pair.public)
        event = _knock(endpoint, options, authenticator.turn, probe_s)
    finally:
        port.socket.unbind(endpoint)
    if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        what = "admitted an unknown key" if event else "did not decide on an unknown key"
        raise ConfigError(f"not listening: the socket {what}, so keys would protect nothing")


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
