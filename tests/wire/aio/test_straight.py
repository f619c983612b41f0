"""Bytes go past the queue of a transport, over real sockets: in order, whole, or not at all."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from tests import certificate
from wire.aio.straight import Write, straight

MANY = bytes(range(256)) * (1 << 14)


class Accepted(asyncio.Protocol):
    """The server's side of a connection."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_free = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(0)
        self.write: Write = straight(self.transport)

    def pause_writing(self) -> None:
        self.is_free.clear()

    def resume_writing(self) -> None:
        self.is_free.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Accepted, socket.socket]]:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    with theirs:
        transport, protocol = await loop.connect_accepted_socket(Accepted, ours)
        try:
            yield protocol, theirs
        finally:
            transport.abort()
            await asyncio.wait_for(protocol.lost, 5)


async def read(client: socket.socket, num_bytes: int) -> bytes:
    body, loop = bytearray(), asyncio.get_running_loop()
    async with asyncio.timeout(20):
        while len(body) < num_bytes and (piece := await loop.sock_recv(client, 1 << 16)):
            body += piece
    return bytes(body)


async def test_it_is_there_before_the_loop_turns() -> None:
    async with connected() as (server, client):
        assert server.write(b"one ") and server.write(b"two")
        assert client.recv(64) == b"one two"


async def test_it_does_not_overtake_what_waits() -> None:
    async with connected() as (server, client):
        server.transport.write(MANY)
        assert not server.write(b"late")
        assert await read(client, len(MANY)) == MANY
        await asyncio.wait_for(server.is_free.wait(), 5)
        assert server.write(b"now")
        assert await read(client, 3) == b"now"


async def test_what_the_kernel_does_not_take_waits_for_it() -> None:
    async with connected() as (server, client):
        assert server.write(MANY)
        assert 0 < server.transport.get_write_buffer_size() < len(MANY)
        assert not server.write(b"late")
        assert await read(client, len(MANY)) == MANY


async def test_a_full_socket_takes_nothing() -> None:
    async with connected() as (server, client):
        piece, num_written = bytes(1 << 10), 0
        while server.write(piece):
            num_written += len(piece)
            if server.transport.get_write_buffer_size():
                break
        num_waiting = server.transport.get_write_buffer_size()
        assert not server.write(piece)
        assert server.transport.get_write_buffer_size() == num_waiting
        assert await read(client, num_written) == bytes(num_written)


async def test_nothing_is_written_to_whoever_has_the_descriptor_now() -> None:
    reading, writing = os.pipe()
    async with connected() as (server, _):
        fd = server.transport.get_extra_info("socket").fileno()
        server.transport.abort()
        assert not server.write(b"late")
        await server.lost
        os.dup2(writing, fd)
        assert not server.write(b"late")
        os.close(writing)
        os.close(fd)
        assert os.read(reading, 64) == b""
        os.close(reading)


async def test_a_client_that_is_gone_is_the_transports_affair() -> None:
    async with connected() as (server, client):
        client.close()
        assert not server.write(b"late")
        server.transport.write(b"late")
        await asyncio.wait_for(server.lost, 5)


async def test_nothing_follows_our_end_of_a_connection() -> None:
    async with connected() as (server, client):
        assert server.write(b"last")
        server.transport.write_eof()
        await asyncio.sleep(0)
        assert await read(client, 64) == b"last"
        assert not server.write(b"late")


async def test_over_tls_it_goes_through_the_seal(tmp_path: Path) -> None:
    made = certificate.make(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert, made.key)
    accepted: asyncio.Queue[Accepted] = asyncio.Queue()

    class Queued(Accepted):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            accepted.put_nowait(self)

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Queued, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=made.trust)
    protocol = await accepted.get()
    try:
        protocol.transport.write(b"head ")  # behind what is left of the handshake
        assert await reader.readexactly(5) == b"head "
        assert protocol.write(b"sealed")
        assert await reader.readexactly(6) == b"sealed"
        protocol.transport.abort()
        assert not protocol.write(b"late")
    finally:
        writer.close()
        server.close()
