"""The HTTP server under people who are slow, many, or no HTTP clients at all."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from router.config import Config
from router.http import Receive, Scope, Send, read_body, respond
from router.httpserver import MAX_HEADER_BYTES, HttpServer, Limits
from router.tls import server_context
from tests import certificate

GET = b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path; reads a body only at /read."""
    if scope["path"] == "/read":
        await read_body(scope, receive)
    size = 30_000_000 if scope["path"] == "/large" else 0
    await respond(send, 200, scope["path"].encode() + bytes(size))


@asynccontextmanager
async def serving(
    limits: Limits | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[HttpServer]:
    server = HttpServer(app, "127.0.0.1", 0, limits or Limits(), tls)
    task = asyncio.create_task(server.run_on_loop())
    try:
        yield server
    finally:
        server.should_exit = True
        await task


async def ask(server: HttpServer, data: bytes) -> bytes:
    """Send and return everything until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(content)["error"]["code"]


QUICK = Limits(grace_s=0.05, idle_s=0.05)


@pytest.mark.parametrize("begun", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\n", b"\r\n"])
async def test_headers_that_do_not_come_in_time(begun: bytes) -> None:
    async with serving(QUICK) as server:
        assert error_of(await ask(server, begun)) == (408, "header_timeout")


async def test_one_byte_after_another_is_not_in_time_either() -> None:
    async with serving(QUICK) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        answer = asyncio.create_task(reader.read())
        for byte in GET % 1 * 20:
            writer.write(bytes([byte]))
            done, _ = await asyncio.wait([answer], timeout=0.02)
            if done:
                break
        assert error_of(await answer) == (408, "header_timeout")
        writer.close()


async def test_a_second_request_has_its_own_time_and_silence_its_end() -> None:
    async with serving(Limits(grace_s=0.2, idle_s=0.2)) as server:
        answer = await ask(server, GET % 1 + GET % 2)
        assert answer.count(b"HTTP/1.1 200") == 2 and answer.endswith(b"/2")


def test_who_hangs_up_first_is_the_client() -> None:
    """Else it may send its next request just as we do, and sees its connection reset."""
    expiry_s = httpx.Limits().keepalive_expiry
    assert expiry_s is not None and expiry_s < Limits().idle_s == Config().idle_s


async def test_empty_lines_do_not_keep_a_connection() -> None:
    async with serving(QUICK) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GET % 1)
        answer = asyncio.create_task(reader.read())
        while not answer.done():
            writer.write(b"\r\n")
            await asyncio.wait([answer], timeout=0.02)
        assert b"header_timeout" in await answer
        writer.close()


async def test_headers_have_a_limit() -> None:
    async with serving() as server:
        data = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADER_BYTES // 6 + 1)
        assert error_of(await ask(server, data)) == (431, "headers_too_large")
        data = b"GET /" + b"x" * MAX_HEADER_BYTES
        assert error_of(await ask(server, data)) == (431, "headers_too_large")


async def test_a_large_body_is_no_large_header() -> None:
    async with serving() as server:
        size = 4 * MAX_HEADER_BYTES
        head = b"POST /read HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        assert (await ask(server, head % size + bytes(size))).endswith(b"\r\n\r\n/read")


async def test_what_is_no_http_is_told_so_without_an_echo() -> None:
    async with serving() as server:
        answer = await ask(server, b"\x16\x03\x01secret\r\n\r\n")
        assert error_of(answer) == (400, "invalid_http")
        assert b"secret" not in answer


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


async def test_a_client_that_does_not_take_its_answer_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.httpserver.FLUSH_S", 0.05)
    async with serving(QUICK) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n")
        while server.server_state.connections:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.01)
        writer.transport.abort()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
async def test_tls(tmp_path: Path) -> None:
    made = certificate.make(tmp_path)
    async with serving(QUICK, server_context(made.cert, made.key)) as server:
        assert server.url.startswith("https://")
        async with httpx.AsyncClient(verify=made.trust, trust_env=False) as client:
            assert (await client.get(f"{server.url}/1")).text == "/1"
        assert await ask(server, b"") == b"", "a handshake that does not begin"
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(trust_env=False) as client:
                await client.get(f"{server.url}/1")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
async def test_tls_handshakes_have_a_limit_too(tmp_path: Path) -> None:
    made = certificate.make(tmp_path)
    limits, tls = Limits(max_connections=1), server_context(made.cert, made.key)
    async with serving(limits, tls) as server:
        _, silent = await asyncio.open_connection("127.0.0.1", server.port)
        assert await ask(server, b"") == b"", "one handshake is under way"
        silent.close()
