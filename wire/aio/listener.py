"""Listens on a TCP port, with or without TLS.

asyncio's own server reports a TLS client only after its handshake, so silent connections would hold
descriptors and buffers that no limit counts.  Hence TLS clients are accepted here, with a limit and
a timer for handshakes alone; the protocol counts connections after that, as without TLS.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Final, Protocol

import structlog

from wire.aio.tls import sealed_protocol

BACKLOG: Final = 1024
# Clients accepted in an iteration of the loop: with one, a full backlog of clients that connect and
# leave would delay all others by as many iterations.
NUM_ACCEPTED: Final = 4
# After an accept that failed: the process has no descriptor left, which takes a while to change.
PAUSE_S: Final = 1.0
# At a client's deadline its bytes are read for this long before it is refused: if the whole process
# stood still, they may have come in time.
LAST_LOOK_S: Final = 0.05
# Clients over the limit that get an error at a time.
MAX_REFUSED: Final = 32

_LOG = structlog.get_logger(__name__)

MakeProtocol = Callable[[], asyncio.Protocol]


class Listener(Protocol):
    """The interface of `Servers` and `Acceptor`."""

    def close(self) -> None:
        """Stop accepting clients, and end the handshakes under way."""

    async def wait_closed(self) -> None:
        """Wait until the sockets are closed and no handshake is left."""


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that listens on `host`:`port` (0: any).  Raises OSError.

    One that `is_shared` gets its share of the connections to an address that is reserved.
    """
    return socket.create_server(
        (host, port), family=_family(host), backlog=BACKLOG, reuse_port=is_shared
    )


def reserve(host: str, port: int, others: Sequence[socket.socket] = ()) -> socket.socket:
    """Reserve `host`:`port` (0: any) for shared sockets of this user, without listening.  On Linux.

    Raises:
        OSError: The address is in use, or is also one of `others` that we have reserved: two
            reservations would mix their connections.
    """
    kept = socket.socket(_family(host))
    try:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((host, port))
        if any(_are_mixed(kept, other) for other in others):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        # After bind: before, it would be shared with whoever else reserved it.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        kept.close()
        raise
    return kept


def _are_mixed(one: socket.socket, other: socket.socket) -> bool:
    """Whether one client could reach either socket."""
    (host, port), (other_host, other_port) = (each.getsockname()[:2] for each in (one, other))
    is_at_both = host == other_host or {host, other_host} & {"0.0.0.0", "::"}
    return port == other_port and one.family == other.family and bool(is_at_both)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def gets_refusal(num_connections: int, max_connections: int) -> bool:
    """Whether a client over the limit gets an error, which keeps its descriptor for 1 or 2 s.

    Of many at once the rest are cut off at once: they would take all descriptors that are left.
    """
    return num_connections - max_connections <= max(1, min(MAX_REFUSED, max_connections // 4))


async def listen(
    make_protocol: MakeProtocol,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    *,
    handshake_s: float,
    max_handshakes: int,
    pause_s: float = PAUSE_S,
) -> Listener:
    """Give each client of a listening socket a protocol, under TLS once its handshake is over.

    At most `max_handshakes` are under way, each for `handshake_s`; for one more, the oldest is cut.
    When no descriptor is left, the next client is accepted after `pause_s`.
    """
    if tls is not None:
        shake_hands = partial(_shake_tls_hands, make_protocol, tls, handshake_s)
        return Acceptor(sock, shake_hands, max_handshakes, pause_s)
    create_server = partial(asyncio.get_running_loop().create_server, backlog=BACKLOG)
    sockets = [sock, *(sock.dup() for _ in range(NUM_ACCEPTED - 1))]
    return Servers([await create_server(make_protocol, sock=each) for each in sockets])


class Servers:
    """Servers of one listening socket: uvloop's accepts one client in an iteration of the loop."""

    def __init__(self, servers: Sequence[asyncio.Server]) -> None:
        self._servers = servers

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def wait_closed(self) -> None:
        for server in self._servers:
            await server.wait_closed()


class Acceptor:
    """Accepts one client in an iteration of the loop; each handshake is a task of its own.

    `shake_hands(client)` closes a client whose handshake fails.
    """

    def __init__(
        self,
        sock: socket.socket,
        shake_hands: Callable[[socket.socket], Coroutine[None, None, None]],
        max_handshakes: int,
        pause_s: float = PAUSE_S,
    ) -> None:
        sock.setblocking(False)
        self._socket, self._shake_hands = sock, shake_hands
        self._max_handshakes, self._pause_s = max_handshakes, pause_s
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait((self._accepting, *self._handshakes))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        with self._socket:
            while True:
                try:
                    client, _ = await loop.sock_accept(self._socket)
                except OSError as error:
                    _LOG.warning("cannot accept a connection", error=str(error))
                    await asyncio.sleep(self._pause_s)
                    continue
                if len(self._handshakes) >= self._max_handshakes:
                    # An honest client is done within milliseconds.
                    oldest = next(task for task in self._handshakes if not task.cancelling())
                    oldest.cancel()
                self._start(client)
                await asyncio.sleep(0)  # let the rest of the loop run between many clients

    def _start(self, client: socket.socket) -> None:
        task = asyncio.create_task(self._shake_hands(client))
        self._handshakes[task] = client
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        client = self._handshakes.pop(task)
        if task.cancelled():  # perhaps before it began
            client.close()


async def _shake_tls_hands(
    make_protocol: MakeProtocol, tls: ssl.SSLContext, handshake_s: float, client: socket.socket
) -> None:
    loop = asyncio.get_running_loop()
    shaken: asyncio.Future[None] = loop.create_future()
    sealed = sealed_protocol(make_protocol(), tls, handshake_s, shaken)
    transport, _ = await loop.connect_accepted_socket(lambda: sealed, client)
    try:
        await shaken
    except OSError:  # it speaks no TLS, took too long, or went away
        transport.close()
    except BaseException:
        transport.abort()
        raise
