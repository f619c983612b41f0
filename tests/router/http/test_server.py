"""The HTTP server under people who are slow, many, or no HTTP clients at all."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import shutil
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import cast

import httpx
import pytest
import uvloop

from router.config import Config
from router.http.asgi import Receive, Scope, Send, respond
from router.http.limits import read_body
from router.http.server import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    GuardedProtocol,
    HttpServer,
    Limits,
)
from router.http.transport import find_push
from tests import certificate
from tests.held_up import again_if_held_up
from tests.pause import stand_still
from tests.router.http.serving import ask
from tests.router.http.serving import serving as serve
from wire.aio.listener import bind
from wire.aio.tls import server_context

GET = b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE = b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE_BYTES = 30_000_000
PUSHED = bytes(1 << 15)
POST = b"POST /read HTTP/1.1\r\nhost: x\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path; reads a body only at /read, refuses it unread at /refuse.

    /echo reads the body and answers with that.
    """
    if scope["path"] == "/slow":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begin ", "more_body": True})
        await asyncio.sleep(4 * QUICK.grace_s)
        await send({"type": "http.response.body", "body": b"end"})
        return
    if scope["path"] == "/push":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begin ", "more_body": True})
        push = find_push(send)
        assert push is not None
        # What nobody reads fills the server's buffer, and then a push would have to wait.
        size = len(list(itertools.takewhile(push, itertools.repeat(PUSHED))))
        await send({"type": "http.response.body", "body": b"%d" % size})
        return
    if scope["path"] == "/refuse":
        await respond(send, 413, b"no", headers=((b"connection", b"close"),))
        return
    if scope["path"] == "/echo":
        await respond(send, 200, await read_body(scope, receive) or b"nothing")
        return
    if scope["path"] == "/read":
        await read_body(scope, receive)
    size = LARGE_BYTES if scope["path"] == "/large" else 0
    await respond(send, 200, scope["path"].encode() + bytes(size))


def serving(
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
    on_slow_client: Callable[[], object] = lambda: None,
    app: object = app,
) -> AbstractAsyncContextManager[HttpServer]:
    return serve(app, limits, tls, on_slow_client)


def bind_small(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """As `bind`, with a small buffer of the kernel's: little is enough to fill it."""
    listening = bind(host, port, is_shared=is_shared)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its clients have it too
    return listening


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(content)["error"]["code"]


QUICK = Limits(grace_s=0.05, idle_s=0.05)
CLOSING = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
SLOW = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("begun", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\n", b"\r\n"])
async def test_headers_that_do_not_come_in_time(begun: bytes) -> None:
    async with serving(QUICK) as server:
        assert error_of(await ask(server, begun)) == (408, "header_timeout")


def test_headers_that_came_while_we_stood_still_have_come_in_time() -> None:
    """On the loop that processes run on: it looks at timers before it reads."""

    @again_if_held_up(0.7)  # 0.6 of it on purpose
    async def ask_and_stand_still() -> None:
        async with serving(Limits(grace_s=0.3)) as server:
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(b"GET /1 HTTP/1.1\r\n")
                await ask(server, CLOSING)  # who asked later has been answered
                await stand_still(0.6, lambda: client.sendall(b"host: x\r\n\r\n"))
                client.setblocking(False)
                answer = await asyncio.get_running_loop().sock_recv(client, 4096)
                assert answer.startswith(b"HTTP/1.1 200 ")

    uvloop.run(ask_and_stand_still())


async def test_a_retiring_server_ends_connections_with_their_next_response() -> None:
    """A response that has begun by then cannot say so, and its connection stays for another."""
    async with serving() as server:
        clients = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        idle, streaming, _ = clients
        idle[1].write(GET % 1)
        assert b"connection: close" not in await idle[0].readuntil(b"/1")
        streaming[1].write(SLOW)
        await streaming[0].readuntil(b"begin ")
        server.stop_accepting()
        assert len(server.server_state.connections) == 3
        with pytest.raises(ConnectionRefusedError):  # nobody has inherited the socket here
            await asyncio.open_connection("127.0.0.1", server.port)
        await streaming[0].readuntil(b"end\r\n0\r\n\r\n")
        for reader, writer in clients:
            writer.write(GET % 2)
            assert b"connection: close" in await reader.read()
            writer.close()


async def test_a_body_is_no_part_of_the_headers_after_it() -> None:
    body = bytes(8 * MAX_HEADER_BYTES)
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(2):
            writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(5) == b"/read"
        writer.close()


def test_clients_close_idle_connections_before_the_server() -> None:
    """Else it may send its next request just as we do, and sees its connection reset."""
    expiry_s = httpx.Limits().keepalive_expiry
    assert expiry_s is not None and expiry_s < Limits().idle_s == Config().idle_s


async def test_headers_have_a_limit() -> None:
    async with serving() as server:
        data = b"GET / HTTP/1.1\r\n" + b"a: %b\r\n" % bytes(b"x" * 1019) * 65
        answer = await ask(server, data)
        assert error_of(answer) == (431, "headers_too_large") and b"over 65536 bytes" in answer
        data = b"GET /" + b"x" * MAX_HEADER_BYTES
        assert error_of(await ask(server, data)) == (431, "headers_too_large")


async def test_headers_are_counted_before_they_are_kept() -> None:
    """The shortest within 64 KiB would take the loop forty milliseconds."""
    head = b"GET /1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    async with serving() as server:
        answer = await ask(server, head + b"a: b\r\n" * (MAX_HEADERS - 2) + b"\r\n")
        assert answer.endswith(b"\r\n\r\n/1")
        answer = await ask(server, head + b"a: b\r\n" * (MAX_HEADERS - 1) + b"\r\n")
        assert error_of(answer) == (431, "headers_too_large") and b"over 256 headers" in answer


async def test_a_body_nobody_reads_is_not_waited_for() -> None:
    async with serving() as server:
        answer = await ask(server, b"POST /1 HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nx")
        assert answer.endswith(b"/1")


async def test_connections_have_a_limit() -> None:
    async with serving(Limits(max_connections=2)) as server:
        kept = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        answer = await ask(server, b"")
        assert error_of(answer) == (503, "overloaded") and b"retry-after" in answer
        for reader, writer in kept:
            writer.write(GET % 7)
            assert await reader.readuntil(b"/7")
            writer.close()
        while server.server_state.connections:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GET % 8)
        assert await reader.readuntil(b"/8")
        writer.close()


@pytest.mark.parametrize("idle_s", [0.05, 60.0])
async def test_a_client_that_does_not_take_its_answer_is_cut_off(idle_s: float) -> None:
    """Whether we are about to hang up, or would take another request."""
    is_cut = asyncio.Event()
    limits = Limits(idle_s=idle_s, stall_s=0.05)
    async with serving(limits, on_slow_client=is_cut.set) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(LARGE)
        await reader.readuntil(b"\r\n")
        await is_cut.wait()
        with pytest.raises(ConnectionResetError):
            await reader.read()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell of a reset alone")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("says_good_bye", [False, True])
def test_over_tls_who_leaves_while_something_waits_is_noticed(
    tmp_path: Path,
    says_good_bye: bool,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.http.server.bind", bind_small)
    begun, told = asyncio.Event(), asyncio.Event()
    servers, nums_connected = list[HttpServer](), list[int]()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        event = {"type": "http.response.body", "body": bytes(1 << 14), "more_body": True}
        for _ in range(20):  # more than the kernel takes, and less than makes our side wait
            await send(event)
        begun.set()
        assert (await receive())["type"] == "http.disconnect"
        nums_connected.append(len(servers[0].server_state.connections))
        for _ in range(20):
            await send(event)
        told.set()

    async def leave() -> None:
        made = certificate.make(tmp_path)
        limits, tls = Limits(stall_s=0.2), server_context(made.cert, made.key)
        async with serving(limits, tls, app=endless) as server:
            servers.append(server)
            connect = partial(certificate.deaf_client, made, server.port, GET % 1)
            with await asyncio.to_thread(connect) as client:
                await begun.wait()
                certificate.leave(client, says_good_bye=says_good_bye)
                await told.wait()
                while kept := cast(set[GuardedProtocol], server.server_state.connections):
                    for connection in tuple(kept):
                        connection.poll_disconnect()  # polling often must not delay the close
                    await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(leave(), 30))
    assert nums_connected == [1], "it was told at once, not when we hung up"
    assert not caplog.records


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
async def test_tls(tmp_path: Path) -> None:
    made = certificate.make(tmp_path)
    tls = server_context(made.cert, made.key)
    async with serving(tls=tls) as server:
        async with httpx.AsyncClient(verify=made.trust, trust_env=False) as client:
            assert (await client.get(f"https://127.0.0.1:{server.port}/1")).text == "/1"
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(trust_env=False) as client:
                await client.get(f"https://127.0.0.1:{server.port}/1")
    async with serving(QUICK, tls) as server:
        assert await ask(server, b"") == b"", "a handshake that does not begin"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
async def test_tls_handshakes_have_a_limit_too(tmp_path: Path) -> None:
    made = certificate.make(tmp_path)
    limits, tls = Limits(max_connections=1, grace_s=600.0), server_context(made.cert, made.key)
    async with serving(limits, tls) as server:
        clients = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        eldest, _ = clients[0]
        assert await asyncio.wait_for(eldest.read(), 30) == b"", "it is hung up on for the next"
        for _, writer in clients:
            writer.close()


@pytest.mark.parametrize("more", [b"\r\n", b"G", b"GET /1 HTTP/1.1\r\nhost:"])
@again_if_held_up(0.1)  # the response takes 0.2 s
async def test_bytes_during_a_response_do_not_cut_it(more: bytes) -> None:
    """Its time begins when the answer has ended."""
    async with serving(QUICK) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(SLOW)
        await reader.readuntil(b"begin ")
        writer.write(more)
        answer = await reader.read()
        assert answer.startswith(b"\r\n3\r\nend\r\n0\r\n\r\n")
        assert (b"header_timeout" in answer) == (more != b"\r\n"), "then it is told of its own"
        writer.close()


@pytest.mark.parametrize("path", [b"refuse", b"1"])
async def test_a_client_refused_while_sending_gets_the_response(path: bytes) -> None:
    """A client as most are: it reads when all is sent, or can not be."""

    def post(port: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", "/" + path.decode(), body=bytes(8 << 20))
            return connection.getresponse().status

    async with serving(Limits(flush_s=60.0)) as server:
        statuses = [await asyncio.to_thread(post, server.port) for _ in range(8)]
        assert statuses == [413 if path == b"refuse" else 200] * 8


async def test_a_client_that_never_stops_sending_is_cut_off() -> None:
    async with serving(Limits(flush_s=0.05)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /refuse HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert error_free(await reader.readuntil(b"no")) == 413
        while server.server_state.connections:
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.01)
        writer.close()


def error_free(answer: bytes) -> int:
    return int(answer.split()[1])


@pytest.mark.parametrize(
    "headers",
    [
        b"",
        b"host: x\r\nhost: y\r\n",
        b"host: x\r\ntransfer-encoding: gzip, chunked\r\n",
        b"host: x\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        b"host: x\r\ntransfer-encoding: gzip\r\n",
        b"host: x\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n",
        b"host: x\r\ncontent-length: 4\r\ncontent-length: 5\r\n",
        b"host: x\r\ncontent-length: -1\r\n",
    ],
)
async def test_framings_that_two_servers_might_read_differently(headers: bytes) -> None:
    async with serving() as server:
        data = b"POST /read HTTP/1.1\r\n" + headers + b"\r\n0\r\n\r\n"
        assert error_of(await ask(server, data)) == (400, "invalid_http")


UPGRADES = [
    b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
    b"connection: upgrade\r\nupgrade: websocket\r\n",
]


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("size", [1, 10_000])
async def test_upgrade_offers_are_ignored(upgrade: bytes, size: int) -> None:
    """Java's HttpClient offers h2c with its first request; RFC 9110 7.8 lets a server ignore it."""
    post = b"POST /echo HTTP/1.1\r\nhost: x\r\n" + upgrade
    counted = post + b"content-length: 5\r\n\r\nhello"
    chunked = post + b"transfer-encoding: chunked\r\n\r\n2\r\nfi\r\n3\r\nrst\r\n0\r\n\r\n"
    async with serving() as server:
        data = counted + chunked + post + b"\r\n" + GET % 4
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await asyncio.sleep(0)
        heads, texts = [], []
        for _ in range(4):
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head.split()[1])
            texts.append(
                await reader.readexactly(int(head.split(b"content-length: ")[1].split()[0]))
            )
        assert heads == [b"200"] * 4
        assert texts == [b"hello", b"first", b"nothing", b"/4"]
        writer.close()


async def test_http_1_0_gets_a_stream_without_chunks() -> None:
    async with serving(QUICK) as server:
        for request in (b"GET", b"HEAD"):
            answer = await ask(server, request + b" /slow HTTP/1.0\r\n\r\n")
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"connection: close" in head and b"transfer-encoding" not in head
            assert body == (b"begin end" if request == b"GET" else b"")
        whole = await ask(server, b"GET /1 HTTP/1.0\r\n\r\n")
        assert b"content-length: 2\r\n" in whole
        assert (await ask(server, SLOW)).count(b"transfer-encoding: chunked") == 1


async def test_http_1_0_is_never_told_to_continue() -> None:
    """RFC 9110 10.1.1: such a client would take it for the answer."""
    for version, count in ((b"1.0", 0), (b"1.1", 1)):
        head = b"POST /echo HTTP/" + version + b"\r\nhost: x\r\nconnection: close\r\n"
        async with serving() as server:
            body = b"expect: 100-continue\r\ncontent-length: 2\r\n\r\nhi"
            answer = await ask(server, head + body)
            assert answer.count(b"100 Continue") == count and answer.endswith(b"hi")


async def test_bytes_after_an_unread_body_are_not_a_request() -> None:
    asked = list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        await respond(send, 200, b"")

    async with serving(app=app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /1 HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nx")
        assert error_free(await reader.read()) == 200, "and it has ended its side"
        writer.write(b"y" + GET % 2)
        writer.close()
        while server.server_state.connections:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0)
        assert asked == ["/1"]


@pytest.mark.parametrize("chunk", [b"5\r\nhello!", b"x\r\n", b"-1\r\n", b"f" * 17 + b"\r\n"])
async def test_a_broken_body_is_told_so(chunk: bytes) -> None:
    async with serving() as server:
        data = POST + b"transfer-encoding: chunked\r\n\r\n" + chunk
        assert error_of(await ask(server, data)) == (400, "invalid_http")
        answer = await ask(server, GET % 1 + data)
        assert answer.startswith(b"HTTP/1.1 200") and b"invalid_http" in answer


async def test_a_body_of_single_bytes_is_cut_short() -> None:
    piece, end = b"1\r\nx\r\n", b"0\r\n\r\nGET /next HTTP/1.0\r\n\r\n"
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    async with serving() as server:
        assert (await ask(server, head + piece * 4096 + end)).endswith(b"/next")
        answer = await ask(server, head + piece * 4097 + end)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"4096 pieces of under 64 B" in answer


async def test_trailers_are_not_kept() -> None:
    async with serving() as server:
        head = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
        assert (await ask(server, head + b"a: b\r\n\r\n")).endswith(b"/read")
        num_within = MAX_HEADER_BYTES // len(b"a: b\r\n")
        assert (await ask(server, head + b"a: b\r\n" * num_within + b"\r\n")).endswith(b"/read")
        answer = await ask(server, head + b"a: b\r\n" * (num_within + 1) + b"\r\n")
        assert error_of(answer) == (400, "invalid_http")


async def test_pipelines_have_a_limit() -> None:
    async with serving() as server:
        answer = await ask(server, GET % 1 * (MAX_PIPELINED + 2))
        assert answer.count(b"HTTP/1.1 200") == MAX_PIPELINED + 1
        assert b"invalid_http" in answer


async def test_a_body_is_pushed_as_far_as_the_client_takes_it() -> None:
    async with serving() as server:
        url = f"http://127.0.0.1:{server.port}/push"
        async with httpx.AsyncClient() as client:
            body = (await client.get(url)).content
    size = int(body.rpartition(b"\0")[2])
    assert size > 0
    assert body == b"begin " + PUSHED * size + b"%d" % size
