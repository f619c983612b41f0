"""The transport of an HTTP connection without a server; `test_server.py` has it with one."""

from __future__ import annotations

import asyncio
import socket

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from router.http.transport import LingeringTransport, find_push
from tests.router.http.asgi_wire import Wire
from wire.aio.slow_readers import SlowReader


class Reading(asyncio.Protocol):
    """Has a client that may be sending bytes that nobody reads."""

    def __init__(self, *, may_have_unread: bool) -> None:
        self.may_have_unread = may_have_unread
        self.flow: FlowControl
        self.is_lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost.set()


@pytest.mark.parametrize("may_have_unread", [False, True])
async def test_a_close_waits_for_the_client_only_if_it_may_be_sending(
    *, may_have_unread: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname(), timeout=10)
        ours, _ = server.accept()
    protocol = Reading(may_have_unread=may_have_unread)
    loop = asyncio.get_running_loop()
    inner, _ = await loop.create_connection(lambda: protocol, sock=ours)
    protocol.flow = FlowControl(inner)
    lingering = LingeringTransport(protocol, inner, SlowReader(inner, 10.0, lambda: None), 10.0)
    lingering.write(b"a response")
    lingering.close()
    assert lingering.is_closing() and inner.is_closing() == (not may_have_unread)
    with theirs:
        received = await asyncio.to_thread(theirs.recv, 100)
        assert received == b"a response"
        assert await asyncio.to_thread(theirs.recv, 100) == b"", "it has sent EOF"
    await protocol.is_lost.wait()
    lingering.forget()


def test_a_server_of_another_kind_has_no_way_past_asgi() -> None:
    assert find_push(Wire().send) is None
