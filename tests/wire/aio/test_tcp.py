"""The raw TCP server and its limits, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from scripts.tcp_client import Client, connect
from tests import certificate
from tests.held_up import again_if_held_up
from tests.pause import stand_still
from wire.aio.listener import LAST_LOOK_S
from wire.aio.slow_readers import has_left
from wire.aio.tcp import LOOK_S, MAX_AT_ONCE, Connection, Limits, Server, serve
from wire.aio.tls import server_context
from wire.errors import ErrorCode, RemoteProtocolError, WireError
from wire.frames import Cancel, DecodeDone, DecodeToken, Error, Tag
from wire.parts import Message
from wire.payloads import ErrorDetail, decode_map
from wire.process.frame_counters import Traffic
from wire.stream import StreamDecoder, encode

KIB = 1024
# More than the kernel's buffers of a connection hold.
FLOOD_BYTES = 12 << 20
# A value of SO_LINGER: close by a reset.
RESET = b"\1\0\0\0\0\0\0\0"


class Told:
    """A handler that keeps what it is told, and may answer."""

    is_busy = False

    def __init__(self, connection: Connection, answer: Callable[[Told, Message], None]) -> None:
        self.connection = connection
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._answer = answer

    def on_message(self, message: Message) -> None:
        self.messages.put_nowait(message)
        self._answer(self, message)

    def on_closed(self, error: Exception | None) -> None:
        self.closed.set_result(error)


class House:
    """Servers, and the handlers of the last one's clients, in the order they came."""

    def __init__(self) -> None:
        self.handlers: asyncio.Queue[Told] = asyncio.Queue()
        self.num_slow_clients = 0
        self._servers: list[Server] = []

    async def serve(
        self,
        limits: Limits | None = None,
        answer: Callable[[Told, Message], None] = lambda told, message: None,
        traffic: Traffic | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Server:
        handlers = self.handlers = asyncio.Queue()
        self.num_slow_clients = 0

        def make_handler(connection: Connection) -> Told:
            told = Told(connection, answer)
            handlers.put_nowait(told)
            return told

        def count() -> None:
            self.num_slow_clients += 1

        server = await serve(
            "127.0.0.1", 0, make_handler, limits, tls, traffic, on_slow_client=count
        )
        self._servers.append(server)
        return server

    async def aclose(self) -> None:
        for server in self._servers:
            await server.close()
            assert server.num_connections == 0


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    yield house
    await house.aclose()


def echo(told: Told, message: Message) -> None:
    told.connection.send(message.frame)


def flood(told: Told, message: Message) -> None:
    for _ in range(16):
        told.connection.send(DecodeToken(1, 1), bytes(FLOOD_BYTES // 16))


def detail_of(message: Message) -> ErrorDetail:
    return decode_map(ErrorDetail, message.body())


async def test_messages_go_both_ways_in_order(house: House) -> None:
    def echo(told: Told, message: Message) -> None:
        told.connection.send(message.frame, *message.payload)

    traffic = Traffic()
    server = await house.serve(answer=echo, traffic=traffic)
    async with await connect("127.0.0.1", server.port) as client:
        for i in range(1, 2001):
            client.send(DecodeToken(i, i), b"payload", b" in parts")
        await client.drain()
        for i in range(1, 2001):
            payload = (b"payload in parts",)
            assert await client.next_message() == Message(DecodeToken(i, i), payload, ((i, i),))
    told = await house.handlers.get()
    assert told.connection.peer_name.startswith("127.0.0.1:")
    assert traffic.sent == traffic.received == {Tag.DECODE_TOKEN: 2000}
    assert await told.closed is None


async def test_messages_of_one_iteration_leave_in_one_write(house: House) -> None:
    waiting = list[int]()

    def answer(told: Told, message: Message) -> None:
        for token_id in range(3):
            told.connection.send_token(7, token_id)
            waiting.append(told.connection.buffered_bytes)
        told.connection.send(DecodeDone(7))

    server = await house.serve(answer=answer)
    async with await connect("127.0.0.1", server.port) as client:
        client.send(DecodeToken(1, 1))
        for token_id in range(3):
            assert await client.next_message() == Message(
                DecodeToken(7, token_id), (), ((7, token_id),)
            )
        assert await client.next_message() == Message(DecodeDone(7))
    assert waiting == [24, 48, 72]
    assert (await house.handlers.get()).connection.buffered_bytes == 0


async def test_messages_sent_in_the_iteration_of_a_clients_end_are_delivered(house: House) -> None:
    def answer(told: Told, message: Message) -> None:
        first.connection.send(DecodeDone(1))

    server = await house.serve(answer=answer)
    address = "127.0.0.1", server.port
    with socket.create_connection(address) as ending:
        first = await house.handlers.get()
        with socket.create_connection(address) as other:
            await house.handlers.get()
            # The server reads both in one turn of its loop, in this order.
            other.sendall(b"".join(encode(Cancel(1, 0))))
            ending.shutdown(socket.SHUT_WR)
            assert await first.closed is None
        ending.setblocking(False)
        octets = await asyncio.get_running_loop().sock_recv(ending, KIB)
    assert octets == b"".join(encode(DecodeDone(1)))


async def test_a_reset_connection_delays_no_write_of_others(house: House) -> None:
    def answer(told: Told, message: Message) -> None:
        for each in (first, told):
            each.connection.send(DecodeDone(1))

    server = await house.serve(answer=answer)
    address = "127.0.0.1", server.port
    vanishing = socket.create_connection(address)
    vanishing.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    first = await house.handlers.get()
    with socket.create_connection(address) as other:
        await house.handlers.get()
        # The server reads both in one turn of its loop, in this order.
        vanishing.close()
        other.sendall(b"".join(encode(Cancel(1, 0))))
        other.setblocking(False)
        async with asyncio.timeout(30):
            octets = await asyncio.get_running_loop().sock_recv(other, KIB)
    assert octets == b"".join(encode(DecodeDone(1)))
    assert first.closed.done()


async def test_the_loop_runs_between_many_messages_of_one_read(house: House) -> None:
    """Thousands of small frames are in one read: the loop goes round between them."""
    loop = asyncio.get_running_loop()
    in_this_turn, longest, num_messages = 0, 0, 20 * MAX_AT_ONCE + 1

    def count(told: Told, message: Message) -> None:
        nonlocal in_this_turn, longest
        if not in_this_turn:
            loop.call_soon(turn)
        in_this_turn += 1
        longest = max(longest, in_this_turn)

    def turn() -> None:
        nonlocal in_this_turn
        in_this_turn = 0

    server = await house.serve(answer=count)
    async with await connect("127.0.0.1", server.port) as client:
        told = await house.handlers.get()
        for i in range(num_messages):
            client.send(Cancel(i + 1, 0))
        await client.drain()
        came = [(await told.messages.get()).frame for _ in range(num_messages)]
    assert came == [Cancel(i + 1, 0) for i in range(num_messages)]
    assert longest <= 2 * MAX_AT_ONCE, "what was read while others had theirs may follow at once"


async def test_a_client_that_goes_amid_much_is_noticed(house: House) -> None:
    def refuse(told: Told, message: Message) -> None:
        if message.frame == Cancel(3 * MAX_AT_ONCE, 0):
            raise RemoteProtocolError("enough")

    for last in (2 * MAX_AT_ONCE, 4 * MAX_AT_ONCE):
        server = await house.serve(answer=refuse)
        client = await connect("127.0.0.1", server.port)
        for i in range(last):
            client.send(Cancel(i + 1, 0))
        await client.close()
        told = await house.handlers.get()
        error = await told.closed
        assert (error is None) == (last < 3 * MAX_AT_ONCE)
        assert told.messages.qsize() == min(last, 3 * MAX_AT_ONCE)


async def test_a_client_that_breaks_the_protocol_gets_an_error(house: House) -> None:
    server = await house.serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    # More follows than the server will ever read: the ERROR must not be lost in a reset.
    writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(200 * KIB))
    decoder = StreamDecoder()
    decoder.receive(await reader.read())
    message = decoder.next_message()
    assert message is not None
    assert message.frame == Error(0, ErrorCode.PROTOCOL)
    assert "unknown tag" in detail_of(message).message
    writer.close()
    error = await (await house.handlers.get()).closed
    assert isinstance(error, RemoteProtocolError)


async def test_a_handler_can_refuse_a_message_and_its_bugs_are_not_shown(house: House) -> None:
    def refuse(told: Told, message: Message) -> None:
        if message.frame == Cancel(1, 0):
            raise WireError(ErrorCode.DRAINING, 5000 * "x")
        raise RuntimeError("details for the log only")

    server = await house.serve(answer=refuse)
    for frame, code in ((Cancel(1, 0), ErrorCode.DRAINING), (Cancel(2, 0), ErrorCode.INTERNAL)):
        async with await connect("127.0.0.1", server.port) as client:
            client.send(frame)
            message = await client.next_message()
            assert message is not None and message.frame == Error(0, code)
            assert detail_of(message).message in (4096 * "x", "internal error")
            assert await client.next_message() is None


@pytest.mark.parametrize("sent", [b"", encode(Cancel(1, 0))[0][:10]])
async def test_a_message_must_arrive_in_time(house: House, sent: bytes) -> None:
    server = await house.serve(Limits(message_s=0.05))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    decoder = StreamDecoder()
    decoder.receive(await reader.read())
    message = decoder.next_message()
    assert message is not None and message.frame == Error(0, ErrorCode.PROTOCOL)
    assert "in time" in detail_of(message).message
    writer.close()


@again_if_held_up(0.2)
async def test_a_large_message_has_time_by_its_size(house: House) -> None:
    server = await house.serve(Limits(message_s=0.3, min_bytes_per_s=64 * KIB), echo)
    body = b"".join(encode(DecodeToken(1, 1), bytes(64 * KIB)))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with Client(reader, writer) as client:
        for i in range(0, len(body), 8 * KIB):
            writer.write(body[i : i + 8 * KIB])
            await asyncio.sleep(0.05)  # 0.4 s in all, over message_s
        assert await client.next_message() == Message(DecodeToken(1, 1), (), ((1, 1),))
        # Between messages a client may be silent.
        client.send(Cancel(1, 0))
        assert await client.next_message() == Message(Cancel(1, 0))
    assert await (await house.handlers.get()).closed is None


@again_if_held_up(0.7)  # 0.6 of it on purpose
async def test_bytes_that_arrived_while_the_process_stood_still_are_in_time(house: House) -> None:
    limits = Limits(message_s=0.3, min_bytes_per_s=1 << 30)
    server = await house.serve(limits, answer=echo)
    octets = b"".join(encode(Cancel(1, 0)))
    # What is more than one read takes.
    large = b"".join(encode(Cancel(1, 0), bytes(400 * KIB)))
    with contextlib.ExitStack() as stack:
        connect_one = partial(socket.create_connection, ("127.0.0.1", server.port))
        silent, begun, half = clients = [stack.enter_context(connect_one()) for _ in range(3)]
        half.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        begun.sendall(octets[:10])
        half.sendall(large[:10])
        for _ in range(3):
            await house.handlers.get()

        def send_rest() -> None:
            silent.sendall(octets)
            begun.sendall(octets[10:])
            half.sendall(large[10:])

        await stand_still(2 * limits.message_s, send_rest)
        for client in clients:
            client.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(client, 4096) == octets
            client.sendall(octets[:10])
        await asyncio.sleep(limits.message_s / 2)  # which is in time again
        for client in clients:
            client.sendall(octets[10:])
            assert await asyncio.get_running_loop().sock_recv(client, 4096) == octets


async def test_bytes_that_trickle_buy_no_time(house: House) -> None:
    server = await house.serve(Limits(message_s=0.2))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

    async def trickle() -> None:
        for octet in b"".join(encode(Cancel(1, 0), bytes(300))):
            writer.write(bytes([octet]))
            await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    async with Client(reader, writer) as client:
        message = await client.next_message()
        assert message is not None and message.frame == Error(0, ErrorCode.PROTOCOL)
        assert not trickling.done()
        trickling.cancel()


def deaf_client(port: int, recv_bytes: int = 4 * KIB) -> socket.socket:
    """A client that asks once and does not read by itself, with a small window."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, recv_bytes)
    client.connect(("127.0.0.1", port))
    client.sendall(b"".join(encode(Cancel(1, 0))))
    return client


async def test_a_client_that_does_not_read_is_dropped_after_the_stall_time(house: House) -> None:
    server = await house.serve(Limits(stall_s=0.1, max_write_bytes=64 << 20), answer=flood)
    with deaf_client(server.port):
        told = await house.handlers.get()
        error = await told.closed
        assert isinstance(error, WireError) and error.code is ErrorCode.DEADLINE_EXCEEDED
        await told.connection.closed
    assert house.num_slow_clients == 1


@again_if_held_up(0.4)
async def test_a_second_stall_is_cut_as_the_first_would_have_been(house: House) -> None:
    num_bytes = FLOOD_BYTES
    limits = Limits(stall_s=0.5, max_write_bytes=64 << 20, high_water_bytes=64 * KIB)
    server = await house.serve(limits, answer=flood)
    loop = asyncio.get_running_loop()
    with deaf_client(server.port, 256 * KIB) as client:
        client.setblocking(False)
        told = await house.handlers.get()
        await told.messages.get()
        assert told.connection.buffered_bytes > limits.high_water_bytes and server.is_answering
        while num_bytes > 0:
            num_bytes -= len(await loop.sock_recv(client, 1 << 20))
        await asyncio.sleep(1.1 * limits.stall_s)
        assert not told.closed.done() and not server.is_answering, "it has caught up"
        for _ in range(2):  # The window has grown: what one answer fills is not known.
            await loop.sock_sendall(client, b"".join(encode(Cancel(1, 0))))
        error = await told.closed
        assert isinstance(error, WireError) and error.code is ErrorCode.DEADLINE_EXCEEDED


async def test_a_client_that_ends_its_side_and_does_not_read_is_cut(house: House) -> None:
    """However little of ours waits for it."""

    limits = Limits(stall_s=0.1, max_write_bytes=64 << 20, high_water_bytes=64 << 20)
    server = await house.serve(limits, answer=flood)
    with deaf_client(server.port) as client:
        told = await house.handlers.get()
        await told.messages.get()
        client.shutdown(socket.SHUT_WR)
        await told.closed
        assert told.connection.buffered_bytes
        await told.connection.closed


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell of a reset alone")
@pytest.mark.parametrize("says_good_bye", [False, True])
async def test_over_tls_a_client_that_leaves_while_something_waits_is_noticed(
    made: certificate.Certificate,
    house: House,
    says_good_bye: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = asyncio.Event()

    def look(transport: asyncio.Transport) -> bool:
        looked.set()
        return has_left(transport)

    monkeypatch.setattr("wire.aio.tcp.has_left", look)
    monkeypatch.setattr("wire.aio.tcp.LOOK_S", LOOK_S / 10)
    said = b"".join(encode(DecodeToken(1, 1)))
    # Nothing of this makes our side wait, or look whether the client reads.
    limits = Limits(stall_s=0.2, high_water_bytes=4 * FLOOD_BYTES, max_write_bytes=4 * FLOOD_BYTES)
    server = await house.serve(limits, tls=server_context(made.cert, made.key))
    connect = partial(certificate.deaf_client, made, server.port, said)
    with await asyncio.to_thread(connect) as client:
        told = await house.handlers.get()
        await told.messages.get()
        told.connection.send(DecodeToken(1, 2), bytes(FLOOD_BYTES))
        await looked.wait()  # at one who is still there
        certificate.leave(client, says_good_bye=says_good_bye)
        assert await told.closed is None
        await told.connection.closed
    assert not caplog.records


async def test_a_client_that_has_read_all_is_not_given_the_time_of_a_stall(house: House) -> None:
    server = await house.serve(Limits(stall_s=3600.0, hang_up_s=0.05))
    with deaf_client(server.port):
        told = await house.handlers.get()
        await told.messages.get()
        told.connection.close()
        await told.connection.closed  # The client does not close its side.


async def test_bytes_after_the_close_are_dropped(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = list[bytes]()
    monkeypatch.setattr(StreamDecoder, "receive", lambda _, octets: received.append(octets))
    server = await house.serve()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        told = await house.handlers.get()
        told.connection.close()
        client.sendall(bytes(KIB))
    await told.connection.closed
    assert not received


async def test_pending_bytes_of_a_client_are_bounded(house: House) -> None:
    most = 0

    def flood(told: Told, message: Message) -> None:
        nonlocal most
        for _ in range(1000):
            told.connection.send(DecodeToken(1, 1), bytes(64 * KIB))
            most = max(most, told.connection.buffered_bytes)

    # What is written at once is far less than what may wait: it is the sum that counts.
    limits = Limits(max_write_bytes=1024 * KIB, high_water_bytes=64 * KIB, stall_s=1.0)
    server = await house.serve(limits, answer=flood)
    with deaf_client(server.port) as client:
        told = await house.handlers.get()
        error = await told.closed
        assert isinstance(error, WireError) and error.code is ErrorCode.OVERLOADED
        client.setblocking(False)
        with pytest.raises(ConnectionResetError):  # the kernel keeps nothing of it either
            while await asyncio.get_running_loop().sock_recv(client, 64 * KIB):
                pass
    assert most < 2 * limits.max_write_bytes, "however much is said in one turn"


async def test_connections_over_the_limit_get_an_error_or_are_cut(house: House) -> None:
    server = await house.serve(Limits(max_connections=2, hang_up_s=60.0))
    clients = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
    told, cut = [reader for reader, _ in clients[2:]]
    assert int.from_bytes(await told.readexactly(4), "little") == Tag.ERROR
    with contextlib.suppress(ConnectionResetError):
        assert await cut.read() == b""
    assert house.handlers.qsize() == 2
    for _, writer in clients:
        writer.close()


async def test_closing_the_server_leaves_time_to_read_pending_bytes(house: House) -> None:
    limits = Limits(max_write_bytes=64 << 20, high_water_bytes=64 << 20)
    server = await house.serve(limits, answer=flood)
    with deaf_client(server.port, 256 * KIB) as client:
        client.setblocking(False)
        told = await house.handlers.get()
        await told.messages.get()
        assert server.is_answering
        closing = asyncio.create_task(server.close(grace_s=30.0))
        assert await told.closed is None
        num_bytes = 0
        while octets := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
            num_bytes += len(octets)
    assert num_bytes > FLOOD_BYTES
    await closing


async def test_connections_that_outlast_the_grace_of_a_close_are_cut(house: House) -> None:
    limits = Limits(
        max_write_bytes=64 << 20, high_water_bytes=64 << 20, stall_s=3600.0, hang_up_s=3600.0
    )
    server = await house.serve(limits, answer=flood)
    with deaf_client(server.port), socket.create_connection(("127.0.0.1", server.port)):
        for _ in range(2):
            await house.handlers.get()
        async with asyncio.timeout(30):
            await server.close(grace_s=0.01)
        assert server.num_connections == 0


async def test_over_tls_pending_bytes_are_sent_before_the_close(
    made: certificate.Certificate, house: House
) -> None:
    def flood(told: Told, message: Message) -> None:
        told.connection.send(DecodeToken(1, 1), bytes(FLOOD_BYTES))
        told.connection.close()

    limits = Limits(max_write_bytes=64 << 20, high_water_bytes=64 << 20, hang_up_s=30.0)
    server = await house.serve(limits, flood, tls=server_context(made.cert, made.key))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=made.trust)
    writer.write(b"".join(encode(Cancel(1, 0))))
    assert len(await reader.read()) > FLOOD_BYTES
    writer.close()


async def test_a_client_with_nothing_open_may_not_be_silent_for_long(house: House) -> None:
    server = await house.serve(Limits(idle_s=0.05))
    async with await connect("127.0.0.1", server.port) as client:
        client.send(Cancel(1, 0))
        message = await client.next_message()
        assert message is not None and message.frame == Error(0, ErrorCode.DEADLINE_EXCEEDED)
        assert await client.next_message() is None
    assert isinstance(await (await house.handlers.get()).closed, WireError)
    assert not house.num_slow_clients


@again_if_held_up(0.7)  # 0.6 of it on purpose
async def test_a_client_that_sent_something_while_we_stood_still_is_not_idle(house: House) -> None:
    """The loop looks at timers before it reads."""
    octets = b"".join(encode(Cancel(1, 0)))
    server = await house.serve(Limits(idle_s=0.3), echo)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.setblocking(False)
        client.send(octets)
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(client, 4096) == octets
        await stand_still(0.6, lambda: client.send(octets))
        assert await loop.sock_recv(client, 4096) == octets
        await asyncio.sleep(2 * LAST_LOOK_S)  # no timer is left that would refuse it
        client.send(octets)
        assert await loop.sock_recv(client, 4096) == octets


@again_if_held_up(0.07)  # 0.1 of it makes one timer of both
async def test_a_client_that_hears_something_is_not_idle(house: House) -> None:
    loop, sent_at = asyncio.get_running_loop(), list[float]()

    def answer(told: Told, message: Message) -> None:
        def send() -> None:
            sent_at.append(loop.time())
            told.connection.send(DecodeToken(1, 1))

        loop.call_later(0.4, send)

    server = await house.serve(Limits(idle_s=0.5), answer)
    async with await connect("127.0.0.1", server.port) as client:
        client.send(Cancel(1, 0))
        for frame in (DecodeToken(1, 1), Error(0, ErrorCode.DEADLINE_EXCEEDED)):
            message = await client.next_message()
            assert message is not None and message.frame == frame
        assert loop.time() - sent_at[0] >= 0.5


async def test_a_client_that_waits_for_something_may(house: House) -> None:
    asked = 0

    class Busy:
        """True a few times, each time the timer asks."""

        def __get__(self, told: object, kind: object) -> bool:
            nonlocal asked
            asked += 1
            return asked < 4

    Told.is_busy, kept = Busy(), Told.is_busy  # type: ignore[assignment]
    try:
        server = await house.serve(Limits(idle_s=0.02))
        async with await connect("127.0.0.1", server.port) as client:
            client.send(Cancel(1, 0))
            message = await client.next_message()
            assert message is not None and message.frame == Error(0, ErrorCode.DEADLINE_EXCEEDED)
        assert asked == 4
    finally:
        Told.is_busy = kept
