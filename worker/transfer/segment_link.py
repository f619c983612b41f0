"""A prefill worker's end of a segment connection: `SegmentLink`.  SPEC 6.9.

Plain TCP, and a thread that sends KV from its blocks, without a queue, another thread or a copy
between.  With keys it is sealed.  Offers, credit and ends stay on the KV socket, and segments, too,
while this connection is not up.
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

# To connect.
PATIENCE_S: Final = 10.0
# Without an acknowledgement, until the system ends the connection.
SILENCE_S: Final = 30.0


class SegmentLink:
    """The connection to one decode worker, whose KV socket is at `kv_endpoint`.

    The next offer carries `token`; each connection needs a new one.  `connecting` is the attempt
    under way.  `on_down` is called when a connection that was up has ended.
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
        """Connect to the port in the reply to an offer, unless its `token` is outdated."""
        if self.connecting is None and not self.is_up and token == self.token:
            self.connecting = self._loop.create_task(self._connect(port))

    async def run(
        self, send: Callable[[socket.socket, *Args], R], *args: *Args, num_bytes: int
    ) -> R:
        """Run `send` with the socket, on its thread.  Raises PeerLost if the connection ends."""
        connection = self._connection
        if connection is None:
            raise PeerLost(self._host)
        try:
            return await connection.thread.run(send, connection.socket, *args, num_bytes=num_bytes)
        except OSError as error:
            if self._connection is connection:
                self._lose()
            raise PeerLost(self._host) from error
        except asyncio.CancelledError:
            if self._connection is connection:
                raise
            raise PeerLost(self._host) from None  # it ended before this began

    def reset(self) -> None:
        """End the connection without waiting, and change the token."""
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
            async with asyncio.timeout(PATIENCE_S):
                connected = await _greeted(self._loop, self._host, port, self.token)
            self._connection = Connection(connected, self._lose)
        except (OSError, RuntimeError, UnicodeError) as error:  # of a thread, of a host's name
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

    def _lose(self) -> None:
        if self.is_up:
            log.warning("connection for segments lost", to=self._host)
            self.reset()
            self._on_down()


class Connection:
    """An open connection and its sending `thread`; `on_end` is called when the peer ends it.

    Raises OSError or RuntimeError if there is no descriptor or thread.
    """

    def __init__(self, connected: socket.socket, on_end: Callable[[], None]) -> None:
        self.socket = connected
        self._loop = asyncio.get_running_loop()
        with ExitStack() as undo:
            undo.callback(connected.close)
            # The peer sends nothing more, so the socket is readable when it has ended.  The loop
            # watches it through epoll, as it would make the socket itself nonblocking.
            self._end = undo.enter_context(select.epoll())
            self._end.register(connected, select.EPOLLIN)
            self.thread = Copies()
            self._loop.add_reader(self._end, on_end)
            undo.pop_all()

    def shut(self) -> None:
        self._loop.remove_reader(self._end)
        self._end.close()
        with suppress(OSError):  # it has ended by itself
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.thread.stop()

    async def close(self) -> None:
        """After `shut`, wait for the current read from blocks, off the loop."""
        await asyncio.to_thread(self.thread.join)
        self.thread.close()
        self.socket.close()


def send_all(connected: socket.socket, parts: Sequence[Buffer]) -> None:
    """Send all bytes of `parts`.  Raises OSError."""
    waiting = [memoryview(part).cast("B") for part in parts]
    while waiting:
        sent = connected.sendmsg(waiting)
        while waiting and sent >= len(waiting[0]):
            sent -= len(waiting.pop(0))
        if sent:
            waiting[0] = waiting[0][sent:]


async def _greeted(
    loop: asyncio.AbstractEventLoop, host: str, port: int, token: bytes
) -> socket.socket:
    """Connect, and return a blocking socket once the token is admitted.  Raises OSError."""
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
