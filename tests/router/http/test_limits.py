"""Bodies within their limits of size, pace and values, and beyond them; threads for large ones."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from router.api.errors import Header, HttpError
from router.http import limits
from router.http.asgi import JSON, Disconnected, Event, HttpExchange
from router.http.compression import STEP_BYTES
from router.http.limits import (
    INLINE_BYTES,
    NUM_LARGE,
    NUM_ORDINARY,
    ORDINARY_BYTES,
    Admission,
    Bodies,
    Threads,
)
from tests.held_up import again_if_held_up
from tests.pause import stand_still
from tests.router.http.asgi_wire import scope
from wire.aio.listener import LAST_LOOK_S
from wire.errors import WireError

SLOW = Bodies(grace_s=0.1)


async def whole(exchange: HttpExchange, bodies: Bodies | None = None) -> bytes:
    bodies = bodies or Bodies()
    raw = await bodies.read(exchange)
    bodies.release(exchange, raw)
    return raw


def exchange(
    events: AsyncIterator[Event], length: int | None = None, *headers: Header, asker: str = "anna"
) -> HttpExchange:
    async def receive() -> Event:
        return await anext(events)

    async def send(event: Event) -> None:
        raise AssertionError(event)

    described = [(b"content-type", JSON), *headers]
    if length is not None:
        described.append((b"content-length", b"%d" % length))
    return HttpExchange({"headers": described}, receive, send, "id", 0.0, key_name=asker)


def chunk(data: bytes, more: bool = True) -> Event:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_received_bytes_extend_the_deadline() -> None:
    """Slower than the grace as a whole, but never below the pace."""

    async def events() -> AsyncIterator[Event]:
        yield chunk(bytes(60))
        yield chunk(b"")
        await asyncio.sleep(0.2)
        yield chunk(b"", more=False)

    bodies = Bodies(grace_s=0.05, min_bytes_per_s=1)
    assert len(await whole(exchange(events()), bodies)) == 60


async def test_an_announced_size_does_not_extend_the_deadline() -> None:
    async def events() -> AsyncIterator[Event]:
        for _ in range(100):
            yield chunk(b"x")
            await asyncio.sleep(0.01)
        raise AssertionError("each byte bought time")

    for bodies in (SLOW, Bodies(grace_s=0.1, min_bytes_per_s=200)):
        with pytest.raises(HttpError) as caught:
            await whole(exchange(events(), length=2_000_000), bodies)
        assert (caught.value.status, caught.value.code) == (408, "body_timeout")


@pytest.mark.parametrize(("min_bytes_per_s", "rest"), [(1 << 30, b""), (10, b"3]")])
@again_if_held_up(0.65)  # 0.6 of it on purpose
async def test_a_body_that_came_while_we_stood_still_has_come_in_time(
    min_bytes_per_s: int, rest: bytes
) -> None:
    """And its bytes buy time for the rest, as ever, through one more pause."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    async def events() -> AsyncIterator[Event]:
        while raw := await loop.sock_recv(ours, 1):
            yield chunk(raw)
            await asyncio.sleep(0)  # a turn for each, as where much is read
        yield chunk(b"", more=False)

    bodies = Bodies(grace_s=0.3, min_bytes_per_s=min_bytes_per_s)
    with ours, theirs:
        reading = asyncio.create_task(whole(exchange(events()), bodies))
        await asyncio.sleep(0)  # it has begun, and waits
        await stand_still(0.6, lambda: theirs.sendall(b"[1, 2, "))
        if rest:
            await asyncio.sleep(2 * LAST_LOOK_S)  # and that look is over
            await stand_still(0.6, lambda: theirs.sendall(rest))
        theirs.shutdown(socket.SHUT_WR)
        assert await reading == b"[1, 2, " + rest


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


GZIP = (b"content-encoding", b"gzip")


async def test_a_compressed_body_is_inflated_within_the_limits() -> None:
    """However it is compressed, it counts as what it becomes, and as what came."""

    async def events(raw: bytes) -> AsyncIterator[Event]:
        for byte in raw:
            yield chunk(bytes([byte]))
        yield chunk(b"", more=False)

    bodies = Bodies(max_bytes=STEP_BYTES * 2, max_total_bytes=STEP_BYTES * 4)
    exact, over = (gzip.compress(bytes(STEP_BYTES * 2 + more)) for more in (0, 1))
    first = exchange(events(exact), None, GZIP)
    raw = await bodies.read(first)
    assert raw == bytes(STEP_BYTES * 2) and bodies.total_bytes == len(raw)
    with pytest.raises(WireError, match="too many large bodies"):
        await whole(exchange(events(exact), None, GZIP), bodies)
    bodies.release(first, raw)
    with pytest.raises(HttpError, match=f"over the limit of {STEP_BYTES * 2} bytes"):
        await whole(exchange(events(over), None, GZIP), bodies)
    with pytest.raises(HttpError, match="ends before the end of its gzip stream"):
        await whole(exchange(events(exact[:-1]), None, GZIP), bodies)
    assert bodies.total_bytes == 0


async def test_compressed_bytes_without_content_are_limited() -> None:
    """The name of the file in the header of a gzip file has no end of its own."""

    async def events() -> AsyncIterator[Event]:
        yield chunk(bytes([31, 139, 8, 8, 0, 0, 0, 0, 0, 3]))
        for _ in range(101):
            yield chunk(b"x")
        raise AssertionError("it has no limit")

    with pytest.raises(HttpError) as caught:
        await whole(exchange(events(), None, GZIP), Bodies(max_bytes=110))
    assert caught.value.status == 413


def of(asker: str, size: int) -> HttpExchange:
    """A body that comes in two pieces."""

    async def events() -> AsyncIterator[Event]:
        yield chunk(bytes(size))
        yield chunk(b"", more=False)

    return exchange(events(), asker=asker)


async def test_all_bodies_together_have_a_limit() -> None:
    """It is of those that are being read or worked on, and given back however they end."""
    bodies, first = Bodies(max_total_bytes=100), of("anna", 30)
    raw = await bodies.read(first)
    with pytest.raises(WireError, match="more than the 49 bytes that are left for others"):
        await whole(of("anna", 21), bodies)
    await whole(of("anna", 20), bodies)
    bodies.release(first, raw)
    await whole(of("anna", 50), bodies)
    with pytest.raises(WireError, match="too many large bodies"):
        await whole(of("anna", 51), bodies)
    assert bodies.total_bytes == 0


async def test_no_client_has_more_of_the_bodies_than_is_left_for_others() -> None:
    """However many have what they may have, there is as much for one more."""
    bodies = Bodies(max_total_bytes=120)
    for asker, size in (("anna", 60), ("ben", 30), ("cleo", 15)):
        with pytest.raises(WireError, match="too many large bodies"):
            await whole(of(asker, size + 1), bodies)
        await bodies.read(of(asker, size))
    with pytest.raises(WireError, match="too many large bodies"):
        await whole(of("anna", 1), bodies)
    await whole(of("dora", 7), bodies)


def test_a_body_that_says_nothing_is_told_what_to_say() -> None:
    """A web page may send it to anybody without asking first."""
    with pytest.raises(HttpError, match="curl: -H 'content-type: application/json'") as caught:
        limits.check_content_type(scope())
    assert caught.value.status == 415


@pytest.mark.parametrize("kind", [b"application/x-www-form-urlencoded", b"text/plain"])
def test_other_types_are_415(kind: bytes) -> None:
    headers = [(b"content-type", each) for each in (kind, b"application/json")]
    with pytest.raises(HttpError) as caught:
        limits.check_content_type(scope(*headers))
    assert caught.value.status == 415


def leaving(asker: str = "anna") -> tuple[HttpExchange, asyncio.Event]:
    """An exchange whose body is read, and what makes its client leave."""
    has_left = asyncio.Event()

    async def events() -> AsyncIterator[Event]:
        yield chunk(b"", more=False)
        await has_left.wait()
        yield {"type": "http.disconnect"}

    return exchange(events(), asker=asker), has_left


async def test_small_bodies_need_no_thread() -> None:
    threads, (it, _) = Threads(), leaving()
    assert await threads.run(it, INLINE_BYTES, threading.get_ident) == threading.get_ident()
    assert await threads.run(it, INLINE_BYTES + 1, threading.get_ident) != threading.get_ident()


class Gate:
    """Work that waits until it may go on; `wanted` is in the order in which it began."""

    def __init__(self) -> None:
        self.threads = Threads()
        self.wanted: list[str] = []
        self.go_on, self.running = threading.Event(), threading.Semaphore(0)

    def work(self, name: str) -> None:
        self.wanted.append(name)
        self.running.release()
        assert self.go_on.wait(60)

    def run(self, name: str, size: int, it: HttpExchange | None = None) -> asyncio.Task[None]:
        it = it or leaving(name[0])[0]
        return asyncio.create_task(self.threads.run(it, size, lambda: self.work(name)))

    async def has_begun(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.running.acquire, timeout=60)


async def test_large_bodies_wait_for_each_other_and_others_do_not_wait_for_them() -> None:
    gate = Gate()
    asked = [gate.run(f"a large {number}", ORDINARY_BYTES + 1) for number in range(4)]
    asked.append(gate.run("b large", ORDINARY_BYTES + 1))
    asked += [gate.run(f"a{number}", ORDINARY_BYTES) for number in range(4)]
    try:
        await gate.has_begun(NUM_LARGE + NUM_ORDINARY - 1)
        assert sorted(gate.wanted) == ["a large 0", "a0", "a1"]
        asked.append(gate.run("b", ORDINARY_BYTES))
        await gate.has_begun(1)
        assert gate.wanted[-1] == "b", "a thread is free for another client"
    finally:
        gate.go_on.set()
        await asyncio.gather(*asked)
    large = [name for name in gate.wanted if "large" in name]
    assert large == ["a large 0", "b large", "a large 1", "a large 2", "a large 3"]


class Client:
    """One request of a client, which leaves when the test says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_left = asyncio.Event()

    async def _receive(self) -> Event:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: Event) -> None:
        raise AssertionError(event)

    async def begin(self, admission: Admission, begun: list[str]) -> None:
        exchange = HttpExchange({}, self._receive, self._send, "id", 0.0, key_name=self.name)
        await admission.wait(exchange)
        begun.append(self.name)


async def test_the_first_request_of_another_client_begins_before_the_rest_of_many() -> None:
    admission, begun = Admission(), list[str]()
    names = ["anna"] * 50 + ["ben"] * 2
    await asyncio.gather(*[Client(name).begin(admission, begun) for name in names])
    assert begun == ["anna", "anna", "ben", "anna", "ben", *["anna"] * 47]


async def test_a_request_whose_client_leaves_while_it_waits_never_begins() -> None:
    admission, begun = Admission(), list[str]()
    clients = [Client("anna") for _ in range(40)]
    requests = [asyncio.create_task(client.begin(admission, begun)) for client in clients]
    for client in clients[10:]:  # noticed long before it would be their turn
        client.has_left.set()
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert begun == ["anna"] * 10
    assert [type(result) for result in results[10:]] == [Disconnected] * 30
    await asyncio.sleep(0)
    with pytest.raises(StopIteration):  # Those that left have no turns to wait for.
        Client("anna").begin(admission, begun).send(None)
