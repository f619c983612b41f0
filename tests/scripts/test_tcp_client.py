"""The small client: messages, the end of a stream, and TLS."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest

from scripts.tcp_client import connect
from tests import certificate
from tests.held_up import again_if_held_up
from wire.aio.tcp import Connection, Limits, serve
from wire.aio.tls import server_context
from wire.errors import RemoteProtocolError
from wire.frames import Cancel, DecodeDone, DecodeToken
from wire.parts import Message
from wire.stream import encode


class Echo:
    """A handler that answers every message with an end, and hangs up after a CANCEL."""

    is_busy = False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def on_message(self, message: Message) -> None:
        self.connection.send(DecodeDone(7), bytes(100_000))
        if isinstance(message.frame, Cancel):
            self.connection.close()

    def on_closed(self, error: Exception | None) -> None: ...


async def test_messages_until_the_end() -> None:
    server = await serve("127.0.0.1", 0, Echo)
    async with await connect("127.0.0.1", server.port) as client:
        client.send(DecodeToken(7, 1))
        client.send(Cancel(7, 0))
        assert [message.frame async for message in client] == [DecodeDone(7), DecodeDone(7)]
    await server.close()


async def test_half_a_message_is_no_end() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(encode(DecodeDone(7)))[:-1])
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    async with server:
        async with await connect("127.0.0.1", server.sockets[0].getsockname()[1]) as client:
            with pytest.raises(RemoteProtocolError):
                await client.next_message()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
@again_if_held_up(0.1)
async def test_tls(tmp_path: Path) -> None:
    made = certificate.make(tmp_path)
    tls = server_context(made.cert, made.key)
    server = await serve("127.0.0.1", 0, Echo, Limits(message_s=0.2), tls)
    async with await connect("127.0.0.1", server.port, made.trust) as client:
        client.send(Cancel(7, 0))
        message = await client.next_message()
        assert message is not None and len(message.body()) == 100_000, "sent before the good-bye"
        assert await client.next_message() is None
    with pytest.raises(ssl.SSLCertVerificationError):
        await connect("127.0.0.1", server.port, ssl.create_default_context())
    # Who speaks no TLS gets no answer, and no connection for long.
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    assert await reader.read() == b""
    writer.close()
    await server.close()
