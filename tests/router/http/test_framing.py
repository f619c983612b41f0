"""Framing of HTTP messages: odd requests, and responses that start or break off."""

from __future__ import annotations

import asyncio
import socket

import pytest

from router.http.asgi import Receive, Scope, Send
from router.http.framing import framing_problem
from router.http.transport import find_push
from tests.router.http.serving import ask, serving

START = {"type": "http.response.start", "status": 200, "headers": []}


class App:
    """Sends the head of an answer, and the rest of it only when it may."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/wait":
            await send(START)
            await self.may_go_on.wait()
            await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        elif scope["path"] == "/push":
            await send(START)
            assert find_push(send) is None  # it would come before the head
            await send({"type": "http.response.body", "body": b"first ", "more_body": True})
            push = find_push(send)
            assert push is not None
            assert push(b"second ")
        elif scope["path"] == "/broken":
            await send(START)
            raise RuntimeError("as applications do")
        else:
            await send(START)
        await send({"type": "http.response.body", "body": b"last"})


def get(path: bytes, method: bytes = b"GET") -> bytes:
    return method + b" " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def test_chunked_is_the_only_coding_in_any_spelling() -> None:
    def problem(*codings: bytes) -> str:
        headers = [(b"host", b"x"), *((b"transfer-encoding", coding) for coding in codings)]
        return framing_problem(headers, "1.1")

    assert not problem() and not problem(b"chunked") and not problem(b" Chunked ")
    assert problem(b"gzip") and problem(b"gzip", b"chunked") and problem(b"chunked", b"chunked")


async def test_the_head_of_an_answer_comes_with_its_first_bytes() -> None:
    async with serving(app := App()) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
            await ask(server, get(b"/"))  # who asked later has a whole answer
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)
            app.may_go_on.set()
            answer = await asyncio.get_running_loop().sock_recv(client, 4096)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and b"\r\n\r\n6\r\nfirst \r\n" in answer


async def test_each_answer_on_a_connection_has_one_head() -> None:
    async with serving(App()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for path in (b"/", b"/push", b"/"):
            writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await reader.readuntil(b"0\r\n\r\n")
            assert answer.count(b"HTTP/1.1 200 OK") == 1
            body = answer.partition(b"\r\n\r\n")[2]
            assert (b"6\r\nfirst \r\n7\r\nsecond \r\n" in body) == (path == b"/push")
        writer.close()


async def test_an_answer_that_is_but_a_head_or_breaks_off_after_it_is_not_held_back() -> None:
    async with serving(App()) as server:
        for request in (get(b"/", b"HEAD"), get(b"/broken")):
            answer = await ask(server, request)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.endswith(b"\r\n\r\n") and answer.count(b"\r\n\r\n") == 1
