"""Bodies: a pace that is kept, a pace that is not, and a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.http.asgi import JSON, Event, HttpError
from router.http.body import Bodies
from router.http.exchange import HttpExchange
from router.http.writer import Disconnected
from wire.errors import WireError

SLOW = Bodies(grace_s=0.1)


async def whole(exchange: HttpExchange, bodies: Bodies | None = None) -> bytes:
    async with (bodies or Bodies()).of(exchange) as raw:
        return raw


def exchange(events: AsyncIterator[Event], length: int | None = None) -> HttpExchange:
    async def receive() -> Event:
        return await anext(events)

    async def send(event: Event) -> None:
        raise AssertionError(event)

    headers = [(b"content-type", JSON)]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    return HttpExchange({"headers": headers}, receive, send, "id", 0.0)


def chunk(data: bytes, more: bool = True) -> Event:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_a_body_in_pieces() -> None:
    async def events() -> AsyncIterator[Event]:
        yield chunk(b"[1,")
        yield chunk(b"2]", more=False)

    assert await whole(exchange(events())) == b"[1,2]"


async def test_what_has_come_buys_time() -> None:
    """Slower than the grace as a whole, but never below the pace."""

    async def events() -> AsyncIterator[Event]:
        yield chunk(bytes(60))
        yield chunk(b"")
        await asyncio.sleep(0.2)
        yield chunk(b"", more=False)

    bodies = Bodies(grace_s=0.05, bytes_per_s=1)
    assert len(await whole(exchange(events()), bodies)) == 60


async def test_a_size_that_is_only_announced_buys_none() -> None:
    async def events() -> AsyncIterator[Event]:
        for _ in range(100):
            yield chunk(b"x")
            await asyncio.sleep(0.01)
        raise AssertionError("each byte bought time")

    with pytest.raises(HttpError) as caught:
        await whole(exchange(events(), length=2_000_000), SLOW)
    assert (caught.value.status, caught.value.code) == (408, "body_timeout")


async def test_a_client_that_leaves() -> None:
    async def events() -> AsyncIterator[Event]:
        yield chunk(b"x")
        yield {"type": "http.disconnect"}

    with pytest.raises(Disconnected):
        await whole(exchange(events()))


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_of_exactly_the_limit(*, announced: bool) -> None:
    async def events(size: int) -> AsyncIterator[Event]:
        yield chunk(bytes(size - 1))
        yield chunk(b"x", more=False)

    bodies = Bodies(max_bytes=100)
    length = 100 if announced else None
    assert len(await whole(exchange(events(100), length), bodies)) == 100
    with pytest.raises(HttpError) as caught:
        await whole(exchange(events(101), length and length + 1), bodies)
    assert caught.value.status == 413


async def test_all_bodies_together_have_a_limit() -> None:
    """It is of those that are being read or worked on, and given back however they end."""

    async def events(size: int) -> AsyncIterator[Event]:
        yield chunk(bytes(size))
        yield chunk(b"", more=False)

    bodies = Bodies(max_total_bytes=100)
    async with bodies.of(exchange(events(60))):
        with pytest.raises(WireError, match="too many large bodies"):
            await whole(exchange(events(41)), bodies)
        await whole(exchange(events(40)), bodies)
    await whole(exchange(events(100)), bodies)
