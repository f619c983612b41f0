"""Listen on a TCP port, with or without TLS.

asyncio's server reports a TLS client only after its handshake, so that silent connections would use
file descriptors and buffers without any limit.  Therefore `Acceptor` accepts TLS clients, with a
limit and a timeout for handshakes.  After the handshake, the protocol counts a connection as it
does without TLS.
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
# Clients accepted per iteration of the event loop.  With only one, a backlog full of clients that
# connect and disconnect would delay other clients by one iteration each.
NUM_ACCEPTED: Final = 4
# Pause after a failed accept: the process has no file descriptor left.
PAUSE_S: Final = 1.0
# After a client's deadline, its data is still read for this long before it is refused: if the whole
# process was suspended, the data may have arrived in time.
LAST_LOOK_S: Final = 0.05
# At most this many clients over the connection limit get an error response at a time.
MAX_REFUSED: Final = 32

_LOG = structlog.get_logger(__name__)

MakeProtocol = Callable[[], asyncio.Protocol]


class Listener(Protocol):
    """A listening server: `Servers` or `Acceptor`."""

    def stop_accepting(self) -> None:
        """Close the listening sockets; handshakes in progress go on."""

    def close(self) -> None:
        """Stop accepting clients and cancel the handshakes in progress."""

    async def wait_closed(self) -> None:
        """Wait until all sockets are closed and all handshakes have ended."""


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that listens on `host`:`port` (0: any free port).  Raises OSError.

    With `is_shared`, several processes listen on one reserved address (SO_REUSEPORT), and the
    kernel distributes connections among them.
    """
    return socket.create_server(
        (host, port), family=_family(host), backlog=BACKLOG, reuse_port=is_shared
    )


def reserve(host: str, port: int, others: Sequence[socket.socket] = ()) -> socket.socket:
    """Bind `host`:`port` (0: any free port) without listening, for `bind(is_shared=True)`.

    This reserves the address for SO_REUSEPORT sockets of this user.  Linux only.

    Raises:
        OSError: The address is in use, or overlaps with one of the reserved sockets `others`, so
            that clients of one would reach the other.
    """
    reserved = socket.socket(_family(host))
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
        if any(_overlap(reserved, other) for other in others):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        # Set after bind, so that bind fails if another process has reserved the address.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        reserved.close()
        raise
    return reserved


def _overlap(one: socket.socket, other: socket.socket) -> bool:
    """Whether a client could reach either socket at the same address."""
    (host, port), (other_host, other_port) = (each.getsockname()[:2] for each in (one, other))
    is_at_both = host == other_host or {host, other_host} & {"0.0.0.0", "::"}
    return port == other_port and one.family == other.family and bool(is_at_both)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def gets_refusal(num_connections: int, max_connections: int) -> bool:
    """Whether a client over the connection limit gets an error response.

    Sending one keeps the connection open for 1 or 2 s.  During a flood of connections most are
    aborted instead, to save file descriptors.
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
    """Accept clients on a listening socket and create a protocol for each.

    With TLS, the protocol is connected after the handshake.  At most `max_handshakes` run at a
    time, each for up to `handshake_s`; a further client cancels the oldest handshake.  If no file
    descriptor is left, accepting pauses for `pause_s`.
    """
    if tls is not None:
        shake_hands = partial(_shake_tls_hands, make_protocol, tls, handshake_s)
        return Acceptor(sock, shake_hands, max_handshakes, pause_s)
    create_server = partial(asyncio.get_running_loop().create_server, backlog=BACKLOG)
    sockets = [sock, *(sock.dup() for _ in range(NUM_ACCEPTED - 1))]
    return Servers([await create_server(make_protocol, sock=each) for each in sockets])


class Servers:
    """Several servers on one socket, because a uvloop server accepts one client per iteration."""

    def __init__(self, servers: Sequence[asyncio.Server]) -> None:
        self._servers = servers

    def stop_accepting(self) -> None:
        for server in self._servers:
            server.close()

    close = stop_accepting

    async def wait_closed(self) -> None:
        for server in self._servers:
            await server.wait_closed()


class Acceptor:
    """Accepts one client per iteration of the event loop and runs each handshake in its own task.

    `shake_hands(client)` must close the client if its handshake fails.
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

    def stop_accepting(self) -> None:
        self._accepting.cancel()

    def close(self) -> None:
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait((self._accepting, *self._handshakes))

    async def _accept(self) -> None:
        with self._socket:
            while True:
                # Not `sock_accept`, which may lose a client when `stop_accepting` cancels it.
                await _until_readable(self._socket)
                try:
                    client, _ = self._socket.accept()
                except BlockingIOError:  # another process that shares the socket took the client
                    continue
                except OSError as error:
                    _LOG.warning("cannot accept a connection", error=str(error))
                    await asyncio.sleep(self._pause_s)
                    continue
                if len(self._handshakes) >= self._max_handshakes:
                    # A well-behaved client completes its handshake within milliseconds.
                    oldest = next(task for task in self._handshakes if not task.cancelling())
                    oldest.cancel()
                client.setblocking(False)
                self._start(client)
                await asyncio.sleep(0)  # let other tasks run between two clients

    def _start(self, client: socket.socket) -> None:
        task = asyncio.create_task(self._shake_hands(client))
        self._handshakes[task] = client
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        client = self._handshakes.pop(task)
        if task.cancelled():  # maybe before it started, so that it did not close the client
            client.close()


async def _until_readable(sock: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)


async def _shake_tls_hands(
    make_protocol: MakeProtocol, tls: ssl.SSLContext, handshake_s: float, client: socket.socket
) -> None:
    loop = asyncio.get_running_loop()
    shaken: asyncio.Future[None] = loop.create_future()
    sealed = sealed_protocol(make_protocol(), tls, handshake_s, shaken)
    transport, _ = await loop.connect_accepted_socket(lambda: sealed, client)
    try:
        await shaken
    except OSError:  # not TLS, a timeout, or the client disconnected
        transport.close()
    except BaseException:
        transport.abort()
        raise
