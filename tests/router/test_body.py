"""Bodies: a pace that is kept, a pace that is not, and a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router import body
from router.body import whole
from router.call import Call
from router.delivery import Disconnected
from router.http import Event, HttpError


def call(events: AsyncIterator[Event], length: int | None = None) -> Call:
    async def receive() -> Event:
        return await anext(events)

    async def send(event: Event) -> None:
        raise AssertionError(event)

    headers = [] if length is None else [(b"content-length", b"%d" % length)]
    return Call({"headers": headers}, receive, send, "id", 0.0)


def chunk(data: bytes, more: bool = True) -> Event:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_a_body_in_pieces() -> None:
    async def events() -> AsyncIterator[Event]:
        yield chunk(b"[1,")
        yield chunk(b"2]", more=False)

    assert await whole(call(events())) == b"[1,2]"


async def test_what_has_come_buys_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower than the grace as a whole, but never below the pace."""
    monkeypatch.setattr(body, "BODY_GRACE_S", 0.05)
    monkeypatch.setattr(body, "BODY_BYTES_PER_S", 1)

    async def events() -> AsyncIterator[Event]:
        yield chunk(bytes(60))
        yield chunk(b"")
        await asyncio.sleep(0.1)
        yield chunk(b"", more=False)

    assert len(await whole(call(events()))) == 60


async def test_a_size_that_is_only_announced_buys_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_GRACE_S", 0.05)

    async def events() -> AsyncIterator[Event]:
        while True:
            yield chunk(b"x")
            await asyncio.sleep(0.01)

    with pytest.raises(HttpError) as caught:
        await whole(call(events(), length=10_000_000))
    assert (caught.value.status, caught.value.code) == (408, "body_timeout")


async def test_a_client_that_leaves() -> None:
    async def events() -> AsyncIterator[Event]:
        yield chunk(b"x")
        yield {"type": "http.disconnect"}

    with pytest.raises(Disconnected):
        await whole(call(events()))
