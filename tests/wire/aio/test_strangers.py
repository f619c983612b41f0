"""How many may wait at a door before they show who they are: on a real socket, and by the order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
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


class House:
    """A hub with keys, whose peers' names are in `messages`; `link` connects one that has a key."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.parties = [f"decode-{rank}" for rank in range(6)]
        write(directory, "router", *self.parties)
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        self.hub = Hub(self._on_message, keys=Keys(directory, "router"))
        self.endpoint = self.hub.bind("tcp://127.0.0.1:*")
        self.links: list[Link] = []
        self.events: asyncio.Queue[str] = asyncio.Queue()

    def _on_message(self, peer: bytes, parts: list[Buffer]) -> None:
        self.messages.put_nowait(peer)

    def link(self, party: str) -> Link:
        link = Link(
            f"{party}-1".encode(),
            self.endpoint,
            lambda parts: None,
            on_up=lambda: self.events.put_nowait("up"),
            on_down=lambda: self.events.put_nowait("down"),
            keys=Keys(self._directory, party),
        )
        self.links.append(link)
        return link

    async def strangers(self, count: int) -> list[socket.socket]:
        loop, port = asyncio.get_running_loop(), int(self.endpoint.rpartition(":")[2])
        come = [socket.socket() for _ in range(count)]
        for stranger in come:
            stranger.setblocking(False)
            await loop.sock_connect(stranger, ("127.0.0.1", port))
            await loop.sock_sendall(stranger, GREETING + ENDLESS)
        return come

    async def close(self) -> None:
        for link in self.links:
            await link.close()
        await self.hub.close()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    yield house
    await house.close()


async def until_cut(strangers: list[socket.socket]) -> None:
    async with asyncio.timeout(4.5):  # libzmq itself would let go of them after 5 s
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                while await asyncio.get_running_loop().sock_recv(stranger, 1 << 10):
                    pass


async def test_of_too_many_who_came_first_is_cut_and_who_has_a_key_gets_in(house: House) -> None:
    with contextlib.ExitStack() as stack:
        for party in house.parties[:3]:  # among strangers, who is known is not one of them
            link = house.link(party)
            link.send([b"hello"])
            assert await house.messages.get() == f"{party}-1".encode()
            strangers = await house.strangers(12)
            for stranger in strangers:
                stack.enter_context(stranger)
            await until_cut(strangers[:8])
        for link in house.links:
            link.send([b"still here"])
            await house.messages.get()
        assert [house.events.get_nowait() for _ in house.links] == ["up"] * 3
        assert house.events.empty()


async def test_who_has_a_key_may_be_silent(house: House) -> None:
    for party in house.parties:
        house.link(party)
        assert await house.events.get() == "up"
    for link in house.links:
        link.send([b"hello"])
    async with asyncio.timeout(10):
        heard = {await house.messages.get() for _ in house.links}
    assert heard == {f"{party}-1".encode() for party in house.parties}
    assert house.events.empty()


async def test_the_descriptor_of_one_that_left_is_another_s_by_now(house: House) -> None:
    left = await house.strangers(4)
    for stranger in left:
        stranger.shutdown(socket.SHUT_WR)
    await until_cut(left)
    pairs = [socket.socketpair() for _ in range(6)]
    strangers = await house.strangers(5)
    await until_cut(strangers[:1])
    for ours, theirs in pairs:
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
    for each in [*left, *strangers, *(end for pair in pairs for end in pair)]:
        each.close()


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
