"""Calls between processes over a real channel."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.api.errors import HttpError
from router.api.responses.store import KeptResponse
from router.core.cluster import ProcessState
from router.core.history.report import RequestReport
from router.core.replay import KeptRequest
from router.page.activity import Activity, Sums, Work
from router.processes import siblings
from router.processes.channel import (
    Answers,
    Ask,
    AskActivity,
    AskAll,
    Assignment,
    Channel,
    Find,
)
from router.processes.merged_metrics import Family
from router.processes.siblings import Siblings

ASSIGNMENT = Assignment(1, 2, "127.0.0.1:1", "127.0.0.1:2", "tcp://127.0.0.1:3", is_again=False)
STATE = ProcessState(7, 1, 2, ["none"], [{"role": "decode"}])
ACTIVITY = Activity(1.5, STATE, [], Sums({"stop": 1}, {3: 1}, {}, {"decode-0": Work(1, 2, 3)}, {}))
FAMILY = Family("baton_x", "X.", "counter", [("baton_x_total", (("a", "b"),), 2.0)])
KEPT = KeptResponse("anna", b"{}", b"[]")


REPORT = RequestReport("r", [])
KEPT_REQUESTS = [KeptRequest("anna", 1, bytes(8), b"", "length", True, ())]


@asynccontextmanager
async def beside(
    answer: Callable[[object], Awaitable[object]],
) -> AsyncIterator[tuple[Siblings, Channel]]:
    """A process's end, and the parent's, which answers like this."""

    async def assignment_first(question: object) -> object:
        return ASSIGNMENT if question is Ask.ASSIGNMENT else await answer(question)

    ours, theirs = socket.socketpair()
    parent = Channel(ours, assignment_first)
    await parent.open()
    process = Siblings(theirs, socket.socket())
    await process.begin()
    assert process.assignment == ASSIGNMENT
    process.answer = answer
    yield process, parent
    await process.close()
    await parent.close()


async def test_a_process_replies_to_the_parent() -> None:
    async def answer(question: object) -> object:
        return REPORT if question == Find("report", "anna", "r") else None

    async with beside(answer) as (_, parent):
        maybe: Any = RequestReport | None
        for who, found in (("anna", REPORT), ("ben", None)):
            assert await parent.ask(Find("report", who, "r"), maybe) == found


@pytest.mark.parametrize("is_complete", [True, False])
async def test_calls_to_all_processes(is_complete: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "STATE_PATIENCE_S", 60.0)

    async def answer(question: object) -> Any:
        assert isinstance(question, AskAll)
        match question.question:
            case Ask.STATE:
                return Answers([STATE, STATE], is_complete=True)
            case AskActivity(since):
                return Answers([ACTIVITY] if since == 2.0 else [], is_complete=True)
            case Ask.METRICS:
                return Answers([[], [FAMILY]], is_complete=True)
            case Find("response", _, name):
                found = [None, KEPT if name == "resp_2" else None]
                return Answers(found, is_complete=is_complete)
            case Find("report", _, name):
                found_report = [None, REPORT if name == "resp_2" else None]
                return Answers(found_report, is_complete=is_complete)
            case Find("delete", _, name):
                return Answers([False, name == "resp_2"], is_complete=is_complete)

    async with beside(answer) as (process, _):
        assert await process.states() == [STATE, STATE]
        assert await process.metrics() == [[], [FAMILY]]
        assert await process.activities(2.0) == Answers([ACTIVITY], is_complete=True)
        assert await process.find("anna", "resp_2") == KEPT
        assert await process.delete("anna", "resp_2")
        assert await process.request("anna", "resp_2") == REPORT
        if is_complete:
            assert await process.find("anna", "resp_3") is None
            assert not await process.delete("anna", "resp_3")
            assert await process.request("anna", "resp_3") is None
            return
        for ask in (
            process.find,
            process.delete,
            process.request,
        ):  # who has it may be the one that is silent
            with pytest.raises(HttpError) as caught:
                await ask("anna", "resp_3")
            assert caught.value.status == 503


async def test_a_parent_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "STATE_PATIENCE_S", 0.01)

    async def answer(question: object) -> object:
        await asyncio.Event().wait()
        return None

    async with beside(answer) as (process, parent):
        assert await process.states() == [], "who asks goes on by what it knows itself"
        assert await process.activities(0.0) == Answers([], is_complete=False)
        metrics = asyncio.create_task(process.metrics())
        await parent.close()
        with pytest.raises(HttpError) as caught:
            await metrics
        assert (caught.value.status, caught.value.code) == (503, "overloaded")
        assert await process.states() == []
