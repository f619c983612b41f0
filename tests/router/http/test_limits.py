"""Bodies within their limits of size, pace and values, and beyond them; threads for large ones."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http import limits
from router.http.asgi import JSON, Disconnected, Event, HttpError, HttpExchange
from router.http.limits import (
    INLINE_BYTES,
    MAX_NUMBERS,
    MAX_OBJECTS,
    NUM_LARGE,
    NUM_ORDINARY,
    ORDINARY_BYTES,
    Bodies,
    Threads,
    Values,
    check_values,
    count_values,
)
from tests.router.http.asgi_wire import Wire, scope
from wire.errors import WireError

TEXTS = st.text(alphabet='"\\,[{é a')
DOCUMENTS = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)
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

    bodies = Bodies(grace_s=0.05, min_bytes_per_s=1)
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


@pytest.mark.parametrize("kind", [b"application/json", b"Application/JSON; charset=utf-8"])
def test_json_that_says_so(kind: bytes) -> None:
    limits.check_content_type(scope((b"content-type", kind)))


def test_a_body_that_says_nothing_is_told_what_to_say() -> None:
    """A web page may send it to anybody without asking first."""
    with pytest.raises(HttpError, match="curl: -H 'content-type: application/json'") as caught:
        limits.check_content_type(scope())
    assert caught.value.status == 415


@pytest.mark.parametrize(
    "header",
    [
        (b"content-type", b"application/x-www-form-urlencoded"),
        (b"content-type", b"text/plain"),
        (b"content-encoding", b"gzip"),
    ],
)
def test_other_types_are_415(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(HttpError) as caught:
        limits.check_content_type(scope(header, (b"content-type", b"application/json")))
    assert caught.value.status == 415


async def test_pieces_are_joined() -> None:
    wire = Wire(
        [
            {"type": "http.request", "body": b"ab", "more_body": True},
            {"type": "http.request", "body": b"c"},
        ]
    )
    assert await limits.read_body(scope(), wire.receive) == b"abc"


async def test_a_client_that_leaves_before_the_end() -> None:
    wire = Wire(
        [{"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.disconnect"}]
    )
    assert await limits.read_body(scope(), wire.receive) is None


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    with pytest.raises(HttpError, match="limit of 9 bytes") as caught:
        await limits.read_body(scope((b"content-length", b"10")), Wire().receive, 9)
    assert caught.value.status == 413
    assert caught.value.headers == ((b"connection", b"close"),)


async def test_a_body_that_grows_too_large_is_left() -> None:
    pieces = [{"type": "http.request", "body": b"x" * 6, "more_body": True}] * 3
    wire = Wire(pieces)
    with pytest.raises(HttpError):
        await limits.read_body(scope((b"content-length", b"lies")), wire.receive, 9)
    assert len(wire.incoming) == 1


def counted(value: Any) -> Values:
    if isinstance(value, str):
        return Values(1, 0)
    if not isinstance(value, list | dict):
        return Values(0, 0)
    inner = list(value) if isinstance(value, list) else [*value.values()]
    keys = len(value) if isinstance(value, dict) else 0
    each = [counted(item) for item in inner]
    return Values(
        1 + keys + sum(item.objects for item in each),
        max(len(value) - 1, 0) + sum(item.commas for item in each),
    )


@given(DOCUMENTS, st.integers(1, 9), st.booleans())
def test_the_count_is_exact_wherever_a_step_ends(
    document: Any,
    step: int,
    escaped: bool,
) -> None:
    raw = json.dumps(document, ensure_ascii=escaped).encode()
    assert count_values(raw, step) == counted(document)


@pytest.mark.parametrize("one", [b"[]", b"{}", b'""', b'{"a":1}'])
def test_objects_have_a_limit(one: bytes) -> None:
    raw = b"[" + b",".join([one] * (MAX_OBJECTS + 1)) + b"]"
    with pytest.raises(HttpError, match="strings, arrays and objects") as caught:
        check_values(raw)
    assert (caught.value.status, caught.value.code) == (413, "too_many_values")


def test_numbers_have_a_limit_and_exactly_it_is_let_in() -> None:
    check_values(b"[" + b",".join([b"1"] * (MAX_NUMBERS + 1)) + b"]")
    with pytest.raises(HttpError, match="values"):
        check_values(b"[" + b",".join([b"1"] * (MAX_NUMBERS + 2)) + b"]")


def test_a_text_is_one_value_whatever_is_in_it() -> None:
    check_values(json.dumps({"prompt": '[{"a",' * 500_000}).encode())


async def test_small_bodies_need_no_thread() -> None:
    threads = Threads()
    assert await threads.run(INLINE_BYTES, threading.get_ident) == threading.get_ident()
    assert await threads.run(INLINE_BYTES + 1, threading.get_ident) != threading.get_ident()


async def test_large_bodies_wait_for_each_other_and_others_do_not_wait_for_them() -> None:
    threads, go_on, wanted = Threads(), threading.Event(), list[int]()
    running = threading.Semaphore(0)

    def work(number: int) -> None:
        wanted.append(number)
        running.release()
        assert go_on.wait(10)

    async def run(size: int, number: int) -> None:
        await threads.run(size, lambda: work(number))

    asked = [asyncio.create_task(run(ORDINARY_BYTES + 1, number)) for number in range(4)]
    asked += [asyncio.create_task(run(ORDINARY_BYTES, number)) for number in range(10, 14)]
    try:
        for _ in range(NUM_LARGE + NUM_ORDINARY):
            assert await asyncio.to_thread(running.acquire, timeout=10)
        assert sorted(wanted) == [0, 10, 11]
    finally:
        go_on.set()
        await asyncio.gather(*asked)
    assert [number for number in wanted if number < 10] == [0, 1, 2, 3], "in the order they came"
