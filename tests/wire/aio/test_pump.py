"""A turn reads a bounded burst, delivers before it settles, and misses no edge."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator

import pytest
import structlog

from wire.aio.pump import MAX_BURST, MAX_BURST_BYTES, MAX_BURST_S, Pump, guarded


class Source:
    """A socket whose descriptors are pipes, readable once for what has happened: edges."""

    def __init__(self, max_burst_s: float = MAX_BURST_S) -> None:
        self._socket_fd, self._poke_socket = os.pipe()
        self._monitor_fd, self._poke_monitor = os.pipe()
        self.inbox: deque[int] = deque()
        self.happened: deque[tuple[int, int]] = deque()
        self.outbox = 0
        self.room = 0
        self.lingers: list[float] = []
        self.story: list[str] = []
        self.idle = asyncio.Event()
        self.all_sent = asyncio.Event()
        self.pump = Pump(self, self.receive, self.notice, self.settle, self.flush, max_burst_s)

    def arrive(self, *sizes: int) -> None:
        self.inbox.extend(sizes)
        os.write(self._poke_socket, b"!")

    def happen(self, event: tuple[int, int]) -> None:
        self.happened.append(event)
        os.write(self._poke_monitor, b"!")

    # What a Port offers.

    @property
    def fds(self) -> tuple[int, int]:
        return self._socket_fd, self._monitor_fd

    def is_readable(self) -> bool:
        os.set_blocking(self._socket_fd, False)
        try:
            os.read(self._socket_fd, 64)
        except BlockingIOError:
            pass
        if not self.inbox:
            self.idle.set()
        return bool(self.inbox)

    def events(self) -> list[tuple[int, int]]:
        if self.happened:
            os.read(self._monitor_fd, 64)
        events = list(self.happened)
        self.happened.clear()
        return events

    async def close(self, linger_s: float) -> None:
        self.story.append("close")
        self.lingers.append(linger_s)
        for fd in (self._socket_fd, self._poke_socket, self._monitor_fd, self._poke_monitor):
            os.close(fd)

    # What the pump calls.

    def receive(self) -> int | None:
        self.story.append("message")
        return self.inbox.popleft()

    def notice(self, event: tuple[int, int]) -> None:
        self.story.append(f"notice {event[0]}")

    def settle(self) -> None:
        self.story.append("settle")

    def flush(self) -> float | None:
        taken = min(self.outbox, self.room)
        self.outbox -= taken
        self.room -= taken
        if self.outbox:
            return 0.001
        self.all_sent.set()
        return None


@pytest.fixture
async def source() -> AsyncIterator[Source]:
    source = Source()
    await source.idle.wait()
    source.story.clear()
    source.idle.clear()
    yield source
    await source.pump.close(0.0)


async def test_one_edge_delivers_everything_in_bounded_turns(source: Source) -> None:
    num_messages = 3 * MAX_BURST
    source.arrive(*[1] * num_messages)
    turns = 0
    while source.inbox:
        before = len(source.inbox)
        await asyncio.sleep(0)
        turns += 1
        assert before - len(source.inbox) <= MAX_BURST
    assert source.story.count("message") == num_messages
    assert turns >= 3


async def test_a_turn_is_bounded_in_bytes_too(source: Source) -> None:
    source.arrive(*[MAX_BURST_BYTES] * 4)
    while source.inbox:
        before = len(source.inbox)
        await asyncio.sleep(0)
        assert before - len(source.inbox) <= 2
    await source.idle.wait()


async def test_a_turn_is_bounded_in_time_too() -> None:
    source = Source(max_burst_s=0.0)  # every message takes longer than that
    source.arrive(*[1] * 20)
    while source.inbox:
        before = len(source.inbox)
        await asyncio.sleep(0)
        assert before - len(source.inbox) <= 1
    await source.idle.wait()
    await source.pump.close(0.0)


async def test_events_are_noticed_at_once_and_settled_after_the_messages(source: Source) -> None:
    source.arrive(*[1] * (2 * MAX_BURST))
    source.happen((5, 7))
    await source.idle.wait()
    await asyncio.sleep(0)
    story = source.story
    assert story.count("notice 5") == 1
    assert story.index("settle") > max(i for i, what in enumerate(story) if what == "message")


async def test_queued_messages_are_retried_without_an_edge(source: Source) -> None:
    source.outbox = 3
    source.all_sent.clear()
    source.pump.wake()
    await source.idle.wait()
    source.room = 3
    await source.all_sent.wait()
    assert source.outbox == 0


async def test_room_found_while_polling_is_used_and_the_socket_polled_again() -> None:
    """Either may have swallowed the edge of the other."""

    class Coupled(Source):
        is_full = False

        def is_readable(self) -> bool:
            if self.is_full:
                self.room = 3
            return super().is_readable()

        def flush(self) -> float | None:
            if self.outbox and self.room:
                self.inbox.append(1)
            super().flush()
            self.is_full = self.outbox > 0
            return 3600.0 if self.is_full else None

    source = Coupled()
    await source.idle.wait()
    source.outbox = 3
    source.pump.wake()
    async with asyncio.timeout(30):
        while source.outbox or source.inbox:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert source.story.count("message") == 1
    await source.pump.close(0.0)


async def test_messages_that_arrive_while_sending_are_read_without_an_edge() -> None:
    """To send may swallow it."""

    class Coupled(Source):
        def flush(self) -> float | None:
            if self.outbox:
                self.inbox.append(1)
            return super().flush()

    source = Coupled()
    await source.idle.wait()
    source.outbox = source.room = 3
    source.pump.wake()
    for _ in range(3):
        await asyncio.sleep(0)
    assert source.outbox == 0 and source.story.count("message") == 1
    await source.pump.close(0.0)


async def test_closing_flushes_first_and_closes_once(source: Source) -> None:
    source.outbox = 3
    closing = asyncio.create_task(source.pump.close(10.0))
    await asyncio.sleep(0)
    assert "close" not in source.story
    source.room = 3
    await closing
    await source.pump.close(10.0)
    assert source.story.count("close") == 1
    source.pump.wake()
    await asyncio.sleep(0)


async def test_closing_waits_no_longer_than_its_linger(source: Source) -> None:
    source.outbox = 3
    await source.pump.close(0.01)
    assert source.outbox == 3
    assert source.lingers == [0.0], "the socket has what is left of it"


def test_a_guarded_handler_logs_what_it_raises() -> None:
    def fail(number: int) -> None:
        raise RuntimeError(f"number {number}")

    with structlog.testing.capture_logs() as logs:
        guarded(fail)(3)
        guarded(None)()
    assert [entry["event"] for entry in logs] == ["handler failed"]
