"""Authenticate the peers of a bound ZeroMQ socket with ZAP (ZeroMQ RFC 27).

At every CURVE handshake, libzmq sends a request to an in-process socket of the same context, and
`Authenticator` responds from the authorized keys in `wire.process.keys`.  Without an authenticator,
libzmq refuses all connections (ZAP_ENFORCE_DOMAIN); `prove` tests that before the socket is bound.
After the handshake, `Gate` checks that a peer's identity belongs to the owner of its key, and
closes the connections of revoked keys.
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
# How often the list of keys is checked, so within what time a revoked key is disconnected.
REFRESH_S: Final = 1.0
PROBE_S: Final = 5.0
_LOG: Final = structlog.get_logger(__name__)


class Authenticator:
    """ZAP handler: responds to libzmq's authentication requests for one context, until closed."""

    def __init__(
        self,
        context: Context,
        keys: Keys,
        domain: bytes = ZAP_DOMAIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_refused = 0
        # The unknown public key that `prove` connects with; its refusal is not logged.
        self.probe_key: str | None = None
        self._keys, self._domain, self._clock = keys, domain, clock
        self._quiet_until = 0.0
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._fd = int(self._socket.FD)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self.respond)

    def respond(self) -> None:
        """Respond to all pending requests, because the file descriptor is edge-triggered."""
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
            if public != self.probe_key:
                self._note(address, reason)
            return [version, request_id, b"400", b"refused", b"", b""]
        return [version, request_id, b"200", b"OK", public.encode(), b""]

    def _note(self, address: bytes, reason: str) -> None:
        """Log a refused connection, at most once per second, to limit the size of the log."""
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
    """Checks the authenticated connections of one bound socket, and closes those of revoked keys.

    Descriptors are reused, and connections of other sockets must not be closed.  Therefore
    `read_events` must call `remove` for every connection that has ended.
    """

    def __init__(self, context: Context, keys: Keys, read_events: Callable[[], None]) -> None:
        self.authenticator = Authenticator(context, keys)
        self._keys, self._read_events = keys, read_events
        self._connections: dict[int, tuple[str, bytes]] = {}  # descriptor -> public key, identity
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(REFRESH_S, self._on_timer)

    def admit(self, peer: bytes, public: str, fd: int, *, is_live: bool) -> bool:
        """Check whether the key `public` may use the identity `peer`; if not, disconnect it."""
        is_authorized = self._is_authorized(public, peer)
        if not is_authorized:
            party = self._keys.party(public) or "revoked"
            _LOG.warning("identity of another", peer=repr(peer)[:64], party=party)
        if is_live and is_authorized:
            self._connections[fd] = public, peer
        elif is_live:
            cut(fd)
        return is_authorized

    def remove(self, fd: int) -> None:
        """Record the end of a connection."""
        self._connections.pop(fd, None)

    def close(self) -> None:
        self._timer.cancel()
        self.authenticator.close()

    def cut_revoked(self) -> None:
        """Reload the list of keys, and close the connections of keys that were removed."""
        self._keys.refresh()
        if self._revoked():
            self._read_events()
        for fd in self._revoked():
            public, _ = self._connections.pop(fd)
            _LOG.warning("key revoked, connection cut", public_key=public)
            cut(fd)

    def _revoked(self) -> list[int]:
        return [fd for fd, its in self._connections.items() if not self._is_authorized(*its)]

    def _is_authorized(self, public: str, peer: bytes) -> bool:
        party = self._keys.party(public)
        return party is not None and is_of_party(peer, party)

    def _on_timer(self) -> None:
        self._timer = self._loop.call_later(REFRESH_S, self._on_timer)
        self.cut_revoked()


def prove(port: Port, keys: Keys, authenticator: Authenticator, probe_s: float = PROBE_S) -> None:
    """Make sure that `port`, which is not bound yet, refuses an unknown key.

    The socket is bound to a loopback port for a moment, and a client with a new key connects to it.
    This blocks the event loop for milliseconds, or for `probe_s` if authentication does not work.
    Raises ConfigError if the unknown key was admitted, or neither admitted nor refused.
    """
    unknown = new_key_pair()
    authenticator.probe_key = unknown.public
    endpoint = port.attach("bind", "tcp://127.0.0.1:*")
    try:
        options = client_options(unknown, keys.pair.public)
        event = _try_handshake(endpoint, options, authenticator.respond, probe_s)
    finally:
        port.socket.unbind(endpoint)
    if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        what = "admitted an unknown key" if event else "did not decide on an unknown key"
        raise ConfigError(f"not listening: the socket {what}, so keys would protect nothing")


def _try_handshake(
    endpoint: str, options: Options, respond: Callable[[], None], probe_s: float
) -> int:
    """Connect a client and wait for its CURVE handshake.

    `respond` answers authentication requests meanwhile, because the event loop is blocked.
    Returns the monitor event that ended the handshake, or 0 if none did within `probe_s`.
    """
    with Context() as context:
        client = context.socket(zmq.DEALER)
        for name, value in options.items():
            client.setsockopt(getattr(zmq, name), value)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RECONNECT_IVL, -1)  # one attempt only
        monitor = client.get_monitor_socket(REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            client.connect(endpoint)
            deadline = time.monotonic() + probe_s
            while time.monotonic() < deadline:
                respond()
                if monitor.poll(5):
                    return int(recv_monitor_message(monitor)["event"])
            return 0
        finally:
            client.disable_monitor()
            monitor.close(0)
            client.close()


def cut(fd: int) -> None:
    """Close a connection that libzmq owns, by shutting down its socket."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as twin:
        twin.shutdown(socket.SHUT_RDWR)
