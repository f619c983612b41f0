"""The channel between two processes: both ask, an answer may come late, and an end is noticed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from router.processes.channel import Ask, AskAll, Channel, Find

Answer = Callable[[object], Awaitable[object]]


@asynccontextmanager
async def channels(one: Answer, other: Answer) -> AsyncIterator[tuple[Channel, Channel]]:
    ends = [
        Channel(sock, answer)
        for sock, answer in zip(socket.socketpair(), (one, other), strict=True)
    ]
    for end in ends:
        await end.open()
    yield ends[0], ends[1]
    for end in ends:
        await end.close()


async def named(question: object) -> object:
    return type(question).__name__


async def test_both_ends_ask() -> None:
    async def find(question: object) -> object:
        assert isinstance(question, Find)
        return ["anna", b"\0" * (1 << 20), question.name.encode()]

    async with channels(named, find) as (one, other):
        found, name = await asyncio.gather(
            one.ask(Find("response", "anna", "resp_1"), tuple[str, bytes, bytes]),
            other.ask(AskAll(Find("delete", "anna", "resp_1")), str),
        )
    assert found == ("anna", b"\0" * (1 << 20), b"resp_1")
    assert name == "AskAll"


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_an_answer_may_come_late_or_to_nobody_who_still_waits(is_given_up: bool) -> None:
    may_end = asyncio.Event()

    async def answer(question: object) -> object:
        if question is Ask.STATE:
            await may_end.wait()
        return type(question).__name__

    async with channels(named, answer) as (one, _):
        late = asyncio.create_task(one.ask(Ask.STATE, str))
        assert await one.ask(Find("response", "", ""), str) == "Find"
        assert not late.done()
        if is_given_up:
            late.cancel()
        else:
            may_end.set()
        await asyncio.wait([late])
        assert late.cancelled() if is_given_up else late.result() == "Ask"
        may_end.set()
        for _ in range(2):  # the first may be answered before that is
            assert await one.ask(Find("response", "", ""), str) == "Find"


async def test_pending_calls_fail_when_the_other_end_closes() -> None:
    async def never(question: object) -> object:
        await asyncio.Event().wait()
        return None

    async with channels(named, never) as (one, other):
        waiting = asyncio.create_task(one.ask(Ask.STATE, str))
        await asyncio.sleep(0)
        await other.close()
        with pytest.raises(ConnectionError):
            await waiting
        with pytest.raises(ConnectionError):
            await one.ask(Ask.STATE, str)
