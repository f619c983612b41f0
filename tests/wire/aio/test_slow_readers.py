"""Slow readers, clients that trickle and clients that never read, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from tests.held_up import again_if_held_up
from wire.aio.slow_readers import MIN_BYTES_PER_S, SlowReader, has_left

KIB = 1024
STALL_S = 0.5
HELD_UP_S = 0.4  # for so long: then who is cut may have been, and rightly
# The kernel's buffer on the server's side: of such a one it tells of each third that is free, which
# at `SLOW` takes longer than a stall may.
SEND_BYTES = 512 * KIB
SLOW_BYTES, TRICKLE_BYTES, EVERY_S = 4 * KIB, 16, 0.02
MANY_BYTES = 4 << 20
# The buffer of a client that acknowledges what it read in pieces of a segment, not of 16 KiB.
FEW_BYTES = 2 * KIB


class Flood(asyncio.Protocol):
    """Writes more than the buffers on the way hold to one client, and may hang up then."""

    def __init__(self, hangs_up: bool, stall_s: float) -> None:
        self.cuts: list[Flood] = []
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hangs_up, self._stall_s = hangs_up, stall_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.unread = SlowReader(self.transport, self._stall_s, self._on_cut)
        self.transport.write(bytes(MANY_BYTES))
        if self._hangs_up:
            self.unread.hang_up(self._stall_s)

    def _on_cut(self) -> None:
        self.cuts.append(self)

    def pause_writing(self) -> None:
        self.unread.watch()

    def resume_writing(self) -> None:
        self.unread.relax()

    def connection_lost(self, exc: Exception | None) -> None:
        self.unread.forget()
        self.lost.set_result(None)


@asynccontextmanager
async def flooded(
    hangs_up: bool = False, stall_s: float = STALL_S, recv_bytes: int = 16 * KIB
) -> AsyncIterator[tuple[Flood, socket.socket]]:
    """A client with small buffers on the way to it."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Queue[Flood] = asyncio.Queue()

    def accept() -> Flood:
        flood = Flood(hangs_up, stall_s)
        accepted.put_nowait(flood)
        return flood

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES // 2)
        server = await loop.create_server(accept, sock=listener)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, recv_bytes)
        if recv_bytes == FEW_BYTES:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, FEW_BYTES // 4)
        client.setblocking(False)
        await loop.sock_connect(client, listener.getsockname())
        flood = await accepted.get()
        try:
            yield flood, client
        finally:  # or else the loop does not end, and nobody is told what failed
            flood.transport.abort()
            await flood.lost
            server.close()


async def read(
    client: socket.socket, at_once: int, num_bytes: int, every_s: float = EVERY_S
) -> int:
    """Read so many bytes, `at_once` each `every_s`; fewer if it ends."""
    loop, count = asyncio.get_running_loop(), 0
    while count < num_bytes:
        if not (part := await loop.sock_recv(client, at_once)):
            break
        count += len(part)
        await asyncio.sleep(every_s)
    return count


@pytest.mark.parametrize("hangs_up", [False, True])
@again_if_held_up(HELD_UP_S)
async def test_a_slow_reader_is_not_cut(hangs_up: bool) -> None:
    async with flooded(hangs_up) as (flood, client):
        slow_bytes = int(4 * STALL_S / EVERY_S) * SLOW_BYTES
        assert await read(client, SLOW_BYTES, slow_bytes) == slow_bytes
        assert not flood.lost.done() and not flood.cuts
        rest = MANY_BYTES - slow_bytes
        assert await read(client, 1 << 20, rest, 0) == rest, "what waited was not lost"
        if hangs_up:
            await flood.lost
        assert not flood.cuts


@pytest.mark.parametrize("hangs_up", [False, True])
@pytest.mark.parametrize("at_once", [0, TRICKLE_BYTES])
async def test_a_client_that_reads_nothing_or_bytes_is_cut(hangs_up: bool, at_once: int) -> None:
    assert TRICKLE_BYTES / EVERY_S < MIN_BYTES_PER_S
    async with flooded(hangs_up) as (flood, client):
        reading = asyncio.create_task(read(client, at_once, at_once and MANY_BYTES))
        await flood.lost
        assert flood.cuts == [flood]
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionResetError):
            await reading
        with pytest.raises(ConnectionResetError):
            while await asyncio.get_running_loop().sock_recv(client, 64 * KIB):
                pass


async def test_a_reader_below_the_least_rate_is_cut() -> None:
    """Though it acknowledges something all the time."""
    stall_s, at_once = 2.0, 50
    assert MIN_BYTES_PER_S / 2 < at_once / EVERY_S < 0.7 * MIN_BYTES_PER_S
    async with flooded(stall_s=stall_s, recv_bytes=FEW_BYTES) as (flood, client):
        with pytest.raises(ConnectionResetError):
            await read(client, at_once, at_once * int(4 * stall_s / EVERY_S))
        assert flood.cuts == [flood]


@again_if_held_up(HELD_UP_S)
async def test_a_client_that_has_read_all_is_closed_and_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does it lose anything; it is no slow reader, however little its last bytes were."""
    stall_s = 2.0  # in which all is read here, on a busy machine too
    monkeypatch.setattr("wire.aio.slow_readers.MIN_BYTES_PER_S", MANY_BYTES / stall_s * 2)
    async with flooded(hangs_up=True, stall_s=stall_s) as (flood, client):
        count = 0
        while flood.transport.get_write_buffer_size():
            count += len(await asyncio.get_running_loop().sock_recv(client, 64 * KIB))
        await flood.lost
        assert not flood.cuts
        assert count + await read(client, 1 << 20, MANY_BYTES, 0) == MANY_BYTES


async def test_a_client_that_is_gone_is_not_cut() -> None:
    async with flooded() as (flood, client):
        client.close()
        await flood.lost
        flood.unread.cut()
        assert not flood.cuts


@again_if_held_up(HELD_UP_S)
async def test_a_reader_that_catches_up_is_not_measured() -> None:
    async with flooded() as (flood, client):
        await read(client, 1 << 20, MANY_BYTES, 0)
        await asyncio.sleep(2 * STALL_S)
        assert not flood.lost.done()


async def test_the_end_of_a_client_shows_without_reading() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, ours)
        transport.pause_reading()
        theirs.sendall(b"more")
        assert not has_left(transport)
        theirs.shutdown(socket.SHUT_WR)
        assert has_left(transport)
        transport.abort()


@again_if_held_up(HELD_UP_S)
async def test_where_the_kernel_does_not_tell_our_own_buffer_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(socket, "TCP_INFO", raising=False)
    async with flooded() as (flood, client):
        loop = asyncio.get_running_loop()
        while flood.transport.get_write_buffer_size() > MANY_BYTES - 3 * SEND_BYTES:
            await loop.sock_recv(client, 64 * KIB)
        assert not flood.cuts
        await flood.lost
        assert flood.cuts == [flood]
