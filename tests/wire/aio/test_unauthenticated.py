"""The bound on unauthenticated connections: on a real socket, and by their order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.wire.aio.house import House
from wire.aio import unauthenticated as module
from wire.aio.sockopts import COMMON
from wire.aio.unauthenticated import UnauthenticatedConnections
from wire.aio.zmq import Link

# ZMTP 3.1 up to the mechanism, and the beginning of a command of 1 MiB.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
ENDLESS = b"\x06" + (1 << 20).to_bytes(8, "big") + bytes(100_000)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNAUTHENTICATED", 4)
    monkeypatch.setitem(COMMON, "HANDSHAKE_IVL", 600_000)  # libzmq itself lets go of nobody


class Besieged(House):
    """Tells what becomes of its links, and lets unauthenticated come."""

    def __init__(self, directory: Path) -> None:
        self.parties = [f"decode-{rank}" for rank in range(6)]
        super().__init__(directory, *self.parties)
        self.events: asyncio.Queue[str] = asyncio.Queue()

    def come(self, party: str) -> Link:
        """Connect one that has a key."""
        return self.link(
            party,
            f"{party}-1".encode(),
            on_up=lambda: self.events.put_nowait("up"),
            on_down=lambda: self.events.put_nowait("down"),
        )

    async def unauthenticated(self, count: int) -> list[socket.socket]:
        loop, port = asyncio.get_running_loop(), int(self.endpoint.rpartition(":")[2])
        come = [socket.socket() for _ in range(count)]
        for stranger in come:
            stranger.setblocking(False)
            await loop.sock_connect(stranger, ("127.0.0.1", port))
            await loop.sock_sendall(stranger, GREETING + ENDLESS)
        return come


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Besieged]:
    house = Besieged(tmp_path)
    yield house
    await house.close()


async def until_cut(unauthenticated: list[socket.socket]) -> None:
    async with asyncio.timeout(30):
        for stranger in unauthenticated:
            with contextlib.suppress(ConnectionError):
                while await asyncio.get_running_loop().sock_recv(stranger, 1 << 10):
                    pass


async def test_the_oldest_unauthenticated_connections_are_cut_and_peers_with_keys_get_in(
    house: Besieged,
) -> None:
    with contextlib.ExitStack() as stack:
        for party in house.parties[:3]:  # among unauthenticated, who is known is not one of them
            link = house.come(party)
            link.send([b"hello"])
            assert (await house.messages.get())[0] == f"{party}-1".encode()
            unauthenticated = await house.unauthenticated(12)
            for stranger in unauthenticated:
                stack.enter_context(stranger)
            await until_cut(unauthenticated[:8])
        for link in house.links:
            link.send([b"still here"])
            await house.messages.get()
        assert [house.events.get_nowait() for _ in house.links] == ["up"] * 3
        assert house.events.empty()


async def test_authenticated_peers_may_be_silent(house: Besieged) -> None:
    for party in house.parties:
        house.come(party)
        assert await house.events.get() == "up"
    for link in house.links:
        link.send([b"hello"])
    async with asyncio.timeout(30):
        heard = {(await house.messages.get())[0] for _ in house.links}
    assert heard == {f"{party}-1".encode() for party in house.parties}
    assert house.events.empty()


async def test_a_reused_descriptor_is_not_cut(house: Besieged) -> None:
    left = await house.unauthenticated(4)
    for stranger in left:
        stranger.shutdown(socket.SHUT_WR)
    await until_cut(left)
    pairs = [socket.socketpair() for _ in range(6)]
    unauthenticated = await house.unauthenticated(5)
    await until_cut(unauthenticated[:1])
    for ours, theirs in pairs:
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
    for each in [*left, *unauthenticated, *(end for pair in pairs for end in pair)]:
        each.close()


async def test_authenticated_and_ended_connections_are_not_counted() -> None:
    cut = list[int]()
    gone = [3]

    def read_events() -> None:
        while gone:
            it.remove(gone.pop())

    it = UnauthenticatedConnections(read_events, cut.append)
    for fd in range(1, 6):
        it.add(fd)
    await asyncio.sleep(0)
    assert cut == [], "one had gone"
    it.drop_oldest()
    it.remove(4)
    for fd in range(6, 9):
        it.add(fd)
    await asyncio.sleep(0)
    assert cut == [2], "1 is taken for the one who is known"
