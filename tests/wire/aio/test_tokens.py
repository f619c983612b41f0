"""Who gets in by a token, on real sockets: once, under its own name, for as long as it is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from wire.aio.tokens import Tokens, identity_of, name_of, new_token
from wire.aio.zmq import Hub, Link
from wire.parts import Buffer

PEER = b"prefill-3-17"
PATIENCE_S = 10


class House:
    """A hub whose peers come with tokens."""

    def __init__(self) -> None:
        self.tokens = Tokens()
        self.heard: asyncio.Queue[tuple[bytes, list[Buffer]]] = asyncio.Queue()
        self.hub = Hub(lambda peer, parts: self.heard.put_nowait((peer, parts)), tokens=self.tokens)
        self.endpoint = self.hub.bind("tcp://127.0.0.1:0")
        self.links: list[Link] = []

    def guest(self, name: bytes, token: bytes | None) -> Guest:
        guest = Guest(self.endpoint, name, token)
        self.links.append(guest.link)
        return guest

    async def hear(self) -> tuple[bytes, list[Buffer]]:
        return await asyncio.wait_for(self.heard.get(), PATIENCE_S)

    async def close(self) -> None:
        for link in self.links:
            await link.close()
        await self.hub.close()


class Guest:
    """Somebody who connects, says something, and notes how it goes."""

    def __init__(self, endpoint: str, name: bytes, token: bytes | None) -> None:
        self.went: asyncio.Queue[str] = asyncio.Queue()
        self.link = Link(
            name,
            endpoint,
            lambda parts: None,
            on_up=lambda: self.went.put_nowait("up"),
            on_down=lambda: self.went.put_nowait("down"),
            on_refused=lambda: self.went.put_nowait("refused"),
            token=token,
        )
        self.link.send([b"hello"])

    async def next(self) -> str:
        return await asyncio.wait_for(self.went.get(), PATIENCE_S)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    yield house
    await house.close()


async def test_who_shows_the_token_told_gets_in_under_a_name_of_its_own(house: House) -> None:
    token = new_token()
    house.tokens.expect(PEER, token)
    guest = house.guest(name_of(PEER, 0), token)
    assert await guest.next() == "up"
    assert await house.hear() == (b"prefill-3-17/0", [b"hello"])


async def test_a_token_opens_one_connection_and_no_other(house: House) -> None:
    token = new_token()
    house.tokens.expect(PEER, token)
    assert await house.guest(name_of(PEER, 0), token).next() == "up"
    await house.hear()
    house.tokens.expect(PEER, token)  # another offer says it again
    for name in (name_of(PEER, 0), name_of(PEER, 1)):
        assert await house.guest(name, token).next() == "refused"
    assert house.heard.empty()


@pytest.mark.parametrize("name", [name_of(PEER, 0), name_of(b"prefill-4-17", 0), PEER, b"x"])
async def test_strangers_are_refused_in_the_handshake(house: House, name: bytes) -> None:
    token = new_token()
    house.tokens.expect(PEER, token)
    shown = new_token() if name.startswith(PEER + b"/") else token
    with capture_logs() as logs:
        assert await house.guest(name, shown).next() == "refused"
    assert [line["reason"] for line in logs if "reason" in line][:1] == ["unknown token"]
    assert token.hex() not in str(logs) and str(token) not in str(logs)
    assert await house.guest(name_of(PEER, 0), token).next() == "up"


async def test_who_shows_nothing_is_not_heard(house: House) -> None:
    token = new_token()
    house.tokens.expect(PEER, token)
    silent = house.guest(name_of(PEER, 0), None)
    assert await house.guest(name_of(PEER, 1), token).next() == "up"
    assert await house.hear() == (name_of(PEER, 1), [b"hello"])
    assert not silent.link.is_up and house.hub.peers == [name_of(PEER, 1)]


async def test_nobody_comes_in_with_a_token_under_another_identity(house: House) -> None:
    """The name that was admitted, and the identity that speaks, are one."""
    token = new_token()
    house.tokens.expect(PEER, token)
    name = house.tokens.admit([name_of(PEER, 5), token])
    assert house.tokens.may_speak(name, name_of(PEER, 5))
    for other in (PEER, name_of(PEER, 6), name_of(b"prefill-4-17", 5)):
        assert not house.tokens.may_speak(name, other)


@pytest.mark.parametrize("end", ["forget", "tell"])
async def test_a_peer_that_is_forgotten_or_tells_another_token_loses_its_connection(
    house: House, end: str
) -> None:
    first, second = new_token(), new_token()
    house.tokens.expect(PEER, first)
    guest = house.guest(name_of(PEER, 0), first)
    assert await guest.next() == "up"
    await house.hear()
    if end == "forget":
        house.tokens.forget(PEER)
    else:
        house.tokens.expect(PEER, second)
    assert await guest.next() == "down"
    assert await house.guest(name_of(PEER, 1), first).next() == "refused"
    house.tokens.expect(PEER, second)
    assert await house.guest(name_of(PEER, 2), second).next() == "up"
    assert (await house.hear())[0] == name_of(PEER, 2)


async def test_who_is_forgotten_before_it_came_does_not_come(house: House) -> None:
    token = new_token()
    house.tokens.expect(PEER, token)
    house.tokens.forget(PEER)
    assert await house.guest(name_of(PEER, 0), token).next() == "refused"


def test_names_say_whose_they_are() -> None:
    assert identity_of(name_of(PEER, 12)) == PEER
    for name in (b"", PEER, PEER + b"/", PEER + b"/x", PEER + b"/1/2", PEER + b"/12345678901"):
        assert identity_of(name) == b""
