"""Unfinished handshakes are counted and timed, and delay no other client."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import ClassVar, cast

import pytest

from tests import certificate
from tests.held_up import again_if_held_up
from wire.aio.listener import PAUSE_S, bind, gets_refusal, listen, reserve


class Echo(asyncio.Protocol):
    """Says back what it hears, and hangs up when the client does."""

    num_made: ClassVar = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Echo.num_made += 1
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


def context_of(made: certificate.Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert, made.key)
    return context


@asynccontextmanager
async def listening(
    tls: ssl.SSLContext | None,
    *,
    handshake_s: float = 10.0,
    max_handshakes: int = 2,
    pause_s: float = PAUSE_S,
) -> AsyncIterator[int]:
    """Listen and give the port."""
    sock = bind("127.0.0.1", 0)
    port: int = sock.getsockname()[1]
    listener = await listen(
        Echo,
        sock,
        tls,
        handshake_s=handshake_s,
        max_handshakes=max_handshakes,
        pause_s=pause_s,
    )
    try:
        yield port
    finally:
        listener.close()
        await listener.wait_closed()


async def echo(port: int, trust: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    writer.write(b"hello")
    said = await reader.readexactly(5)
    writer.close()
    await writer.wait_closed()
    return said


async def silent(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that connects and does not begin its handshake."""
    return await asyncio.open_connection("127.0.0.1", port)


async def test_many_clients_are_accepted_in_one_iteration_of_the_loop() -> None:
    async with listening(None) as port:
        before = Echo.num_made
        with ExitStack() as clients:
            for _ in range(4):
                clients.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(3):  # to see that the socket is readable, to accept, to tell protocols
                await asyncio.sleep(0)
            num_made = Echo.num_made - before
        assert num_made == 4


async def test_for_one_handshake_too_many_the_oldest_is_cut(
    made: certificate.Certificate,
) -> None:
    async with listening(context_of(made), handshake_s=600.0) as port, asyncio.timeout(30):
        oldest, *others = [await silent(port) for _ in range(3)]
        assert await oldest[0].read() == b""
        assert await echo(port, made.trust) == b"hello", "silent clients keep nobody out"
        assert await others[0][0].read() == b""
        for _, writer in (oldest, *others):
            writer.close()


async def test_connections_after_their_handshake_are_not_counted(
    made: certificate.Certificate,
) -> None:
    async with listening(context_of(made)) as port:
        writers = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=made.trust)
            writer.write(b"x")
            assert await reader.read(1) == b"x"
            writers.append(writer)
        for writer in writers:
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
@again_if_held_up(0.5)
async def test_a_handshake_has_its_time_and_its_form(
    made: certificate.Certificate, begun: bytes
) -> None:
    async with listening(context_of(made), handshake_s=1.0, max_handshakes=1) as port:
        reader, writer = await silent(port)
        writer.write(begun)
        await reader.read()  # an alert or nothing, then the end
        writer.close()
        assert await echo(port, made.trust) == b"hello"


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_clients_wait_for_the_process_that_accepts_next(
    made: certificate.Certificate, is_sealed: bool
) -> None:
    """Two listeners of one socket, as of two processes; the first stops during a handshake."""
    tls, trust = (context_of(made), made.trust) if is_sealed else (None, None)
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    kept = sock.dup()
    first = await listen(Echo, sock, tls, handshake_s=600.0, max_handshakes=8)
    assert await echo(port, trust) == b"hello"
    begun = await silent(port)
    await asyncio.sleep(0.05)
    first.stop_accepting()
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(echo(port, trust)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    second = await listen(Echo, kept, tls, handshake_s=600.0, max_handshakes=8)
    assert await asyncio.gather(*waiting) == 3 * [b"hello"]
    reader, writer = begun
    if trust is not None:
        await writer.start_tls(trust, server_hostname="127.0.0.1")
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    writer.close()
    await writer.wait_closed()
    for listener in (first, second):
        listener.close()
        await listener.wait_closed()


async def test_closing_ends_handshakes_and_frees_the_port(made: certificate.Certificate) -> None:
    async with listening(context_of(made), handshake_s=600.0) as port:
        reader, writer = await silent(port)
        await asyncio.sleep(0)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_having_no_descriptor_left_is_waited_out(
    made: certificate.Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, accept = 2, socket.socket.accept

    def fail_twice(sock: socket.socket) -> tuple[socket.socket, object]:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(24, "Too many open files")
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", fail_twice)
    async with listening(context_of(made), pause_s=0.01) as port:
        assert await echo(port, made.trust) == b"hello"
    assert not failures


@pytest.mark.skipif(sys.platform != "linux", reason="Linux divides connections among sockets")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_shared_sockets_divide_a_reserved_address(host: str) -> None:
    with reserve(host, 0) as kept:
        port = kept.getsockname()[1]
        with bind(host, port, is_shared=True) as one, bind(host, port, is_shared=True) as other:
            clients = [socket.create_connection((host, port)) for _ in range(64)]
            for listener in (one, other):
                listener.setblocking(False)
                listener.accept()[0].close()  # each has some
            for client in clients:
                client.close()
            for ask in (reserve, bind):  # another router, with several processes and with one
                with pytest.raises(OSError):
                    ask(host, port)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux divides connections among sockets")
@pytest.mark.parametrize(
    ("host", "other", "are_mixed"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "127.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("::1", "0:0:0:0:0:0:0:1", True),
        ("::", "::1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("127.0.0.1", "::1", False),
        ("0.0.0.0", "::1", False),
    ],
)
def test_one_address_is_not_reserved_twice(host: str, other: str, are_mixed: bool) -> None:
    with reserve(host, 0) as kept:
        port = kept.getsockname()[1]
        if are_mixed:
            with pytest.raises(OSError, match="Address already in use"):
                reserve(other, port, [kept])
        else:
            reserve(other, port, [kept]).close()
        reserve(host, 0, [kept]).close()


@pytest.mark.parametrize(("most", "told"), [(1, 1), (4, 1), (20, 5), (128, 32), (4096, 32)])
def test_some_clients_over_the_limit_get_a_refusal(most: int, told: int) -> None:
    assert [gets_refusal(most + over, most) for over in (1, told, told + 1)] == [True, True, False]
