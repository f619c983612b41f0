"""How many may wait at a door before they show who they are: on a real socket, and by the order."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from tests.wire.process.key_files import write
from wire.aio import strangers as module
from wire.aio.strangers import Strangers
from wire.aio.zmq import Hub, Link
from wire.parts import Buffer
from wire.process.keys import Keys

# ZMTP 3.1 up to the mechanism, and the beginning of a command of 1 MiB.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
ENDLESS = b"\x06" + (1 << 20).to_bytes(8, "big") + bytes(100_000)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STRANGERS", 4)


async def test_of_too_many_who_came_first_is_cut_and_who_has_a_key_gets_in(tmp_path: Path) -> None:
    loop, messages = asyncio.get_running_loop(), asyncio.Queue[bytes]()
    write(tmp_path, "router", "prefill-0", "decode-0")

    def on_message(peer: bytes, parts: list[Buffer]) -> None:
        messages.put_nowait(peer)

    async def is_cut(stranger: socket.socket) -> bool:
        try:
            while await loop.sock_recv(stranger, 1 << 10):
                pass
        except ConnectionError:
            pass
        return True

    hub = Hub(on_message, keys=Keys(tmp_path, "router"))
    endpoint = hub.bind("tcp://127.0.0.1:*")
    keys = Keys(tmp_path, "prefill-0")
    first = Link(b"prefill-0-1", endpoint, lambda parts: None, keys=keys)
    first.send([b"hello"])
    assert await messages.get() == b"prefill-0-1"
    strangers = [socket.socket() for _ in range(12)]
    for stranger in strangers:
        stranger.setblocking(False)
        await loop.sock_connect(stranger, ("127.0.0.1", int(endpoint.rpartition(":")[2])))
        await loop.sock_sendall(stranger, GREETING + ENDLESS)
    async with asyncio.timeout(4):  # libzmq itself would let go of them after 5 s
        assert all([await is_cut(stranger) for stranger in strangers[:8]])
        second = Link(b"decode-0-1", endpoint, lambda parts: None, keys=Keys(tmp_path, "decode-0"))
        second.send([b"hello"])
        assert await messages.get() == b"decode-0-1"
    first.send([b"still here"])
    assert await messages.get() == b"prefill-0-1"
    for stranger in strangers:
        stranger.close()
    for link in (first, second):
        await link.close()
    await hub.close()


async def test_who_is_known_or_gone_is_no_stranger() -> None:
    cut = list[int]()
    gone = [3]

    def read_events() -> None:
        while gone:
            it.leave(gone.pop())

    it = Strangers(read_events, cut.append)
    for fd in range(1, 6):
        it.come(fd)
    await asyncio.sleep(0)
    assert cut == [], "one had gone"
    it.succeed()
    it.leave(4)
    for fd in range(6, 9):
        it.come(fd)
    await asyncio.sleep(0)
    assert cut == [2], "1 is taken for the one who is known"


async def test_a_success_of_nobody_who_waits_changes_nothing() -> None:
    it = Strangers(lambda: None, lambda fd: None)
    it.succeed()
    it.come(1)
    it.leave(1)
    it.leave(1)
