"""A prefill worker's end of a segment connection: a TCP connection for KV only.  SPEC 6.9.

A thread sends KV directly from the blocks to the socket, without a queue or a copy.  If the workers
have keys, the KV is encrypted.  All other frames use the KV socket.  Segments use it as well while
this connection is not up.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Final, TypeVar, TypeVarTuple

import structlog

from wire.errors import PeerLost
from wire.parts import Buffer
from wire.process.frame_counters import Traffic
from wire.transfer import GREETING, new_token
from worker.transfer.thread import Copies

log = structlog.get_logger("worker")
Args = TypeVarTuple("Args")
R = TypeVar("R")

CONNECT_TIMEOUT_S: Final = 10.0
# TCP_USER_TIMEOUT: how long sent data may stay unacknowledged before the connection ends.
SILENCE_S: Final = 30.0


class SegmentLink:
    """The segment connection to the decode worker whose KV socket is at `kv_endpoint`.

    Offers carry the secret `token`, and the connection sends it first, so that the decode worker
    knows whose the connection is.  It is accepted once, so each connection needs a new one.
    `connecting` is the running attempt.  `on_down` is called when an open connection has ended.
    """

    def __init__(self, kv_endpoint: str, traffic: Traffic, on_down: Callable[[], None]) -> None:
        self.token = new_token()
        self._host = kv_endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        self._on_down, self.traffic = on_down, traffic
        self._is_warned = False
        self.connecting: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def is_up(self) -> bool:
        return self._connection is not None

    def open(self, port: int, token: bytes | None) -> None:
        """Start connecting to the port from an ACK, unless `token`, the offer's, is outdated."""
        if self.connecting is None and not self.is_up and token == self.token:
            self.connecting = self._loop.create_task(self._connect(port))

    async def run(
        self, send: Callable[[socket.socket, *Args], R], *args: *Args, num_bytes: int
    ) -> R:
        """Call `send(socket, *args)` on the connection's thread.  Raises PeerLost if it ends."""
        connection = self._connection
        if connection is None:
            raise PeerLost(self._host)
        try:
            return await connection.thread.run(send, connection.socket, *args, num_bytes=num_bytes)
        except OSError as error:
            if self._connection is connection:
                self._on_lost()
            raise PeerLost(self._host) from error
        except asyncio.CancelledError:
            if self._connection is connection:
                raise
            raise PeerLost(self._host) from None  # the connection ended before `send` was called

    def reset(self) -> None:
        """Close the connection in the background, and renew the token for the next one."""
        if self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None
        if self._connection is not None:
            self._connection.shut()
            ending = self._loop.create_task(self._connection.close())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            self._connection = None
        self.token = new_token()

    async def close(self) -> None:
        self.reset()
        await asyncio.gather(*self._ending)

    async def _connect(self, port: int) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connected = await _open_socket(self._loop, self._host, port, self.token)
            self._connection = Connection(connected, self._on_lost)
        # RuntimeError: no thread could be started.  UnicodeError: the host name is invalid.
        except (OSError, RuntimeError, UnicodeError) as error:
            if not self._is_warned:
                self._is_warned = True
                log.warning(
                    "no connection for segments, the KV socket takes them more slowly",
                    to=f"{self._host}:{port}",
                    reason=str(error) or "no answer",
                )
            self.connecting, self.token = None, new_token()
            return
        self.connecting, self._is_warned = None, False
        log.info("segments have a connection of their own", to=f"{self._host}:{port}")

    def _on_lost(self) -> None:
        if self.is_up:
            log.warning("connection for segments lost", to=self._host)
            self.reset()
            self._on_down()


class Connection:
    """An open connection and its sending `thread`; `on_end` is called when the peer closes it.

    Raises OSError or RuntimeError if no file descriptor or thread is available.
    """

    def __init__(self, connected: socket.socket, on_end: Callable[[], None]) -> None:
        self.socket = connected
        self._loop = asyncio.get_running_loop()
        with ExitStack() as undo:
            undo.callback(connected.close)
            # The peer sends nothing more, so the socket becomes readable only when it is closed.
            # The event loop watches an epoll descriptor, because uvloop would make a socket that it
            # watches nonblocking.
            self._end = undo.enter_context(select.epoll())
            self._end.register(connected, select.EPOLLIN)
            self.thread = Copies()
            self._loop.add_reader(self._end, on_end)
            undo.pop_all()

    def shut(self) -> None:
        self._loop.remove_reader(self._end)
        self._end.close()
        with suppress(OSError):  # the peer has closed it already
            self.socket.shutdown(socket.SHUT_RDWR)  # ends a blocking send on the thread
        self.thread.stop()

    async def close(self) -> None:
        """Wait until the thread has ended and reads no blocks; call `shut` before."""
        await asyncio.to_thread(self.thread.join)
        self.thread.close()
        self.socket.close()


def send_all(connected: socket.socket, parts: Sequence[Buffer]) -> None:
    """Send all bytes of `parts`.  Raises OSError."""
    unsent = [memoryview(part).cast("B") for part in parts]
    while unsent:
        num_sent = connected.sendmsg(unsent)
        while unsent and num_sent >= len(unsent[0]):
            num_sent -= len(unsent.pop(0))
        if num_sent:
            unsent[0] = unsent[0][num_sent:]


async def _open_socket(
    loop: asyncio.AbstractEventLoop, host: str, port: int, token: bytes
) -> socket.socket:
    """Connect and send the token; return a blocking socket after the reply.  Raises OSError."""
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    connected = socket.socket(family, kind, protocol)
    try:
        connected.setblocking(False)
        await loop.sock_connect(connected, address)
        await loop.sock_sendall(connected, GREETING + token)
        if await loop.sock_recv(connected, len(GREETING)) != GREETING:
            raise ConnectionRefusedError("the token was refused")
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        silence_ms = int(SILENCE_S * 1000)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)
    except BaseException:
        connected.close()
        raise
    return connected
