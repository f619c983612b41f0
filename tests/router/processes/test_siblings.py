"""Calls between processes over a real channel."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.api.errors import HttpError
from router.api.responses.store import KeptResponse, KeptResponses
from router.core.cluster import ProcessState
from router.core.history.report import RequestReport
from router.processes import siblings
from router.processes.channel import (
    Answers,
    AskAll,
    AskAssignment,
    AskMetrics,
    AskState,
    Assignment,
    Channel,
    DeleteResponse,
    FindRequest,
    FindResponse,
)
from router.processes.merged_metrics import Family
from router.processes.siblings import Siblings

ASSIGNMENT = Assignment(1, 2, "127.0.0.1:1", "127.0.0.1:2", "tcp://127.0.0.1:3", is_again=False)
STATE = ProcessState(7, 1, 2, ["none"], [{"role": "decode"}])
FAMILY = Family("baton_x", "X.", "counter", [("baton_x_total", (("a", "b"),), 2.0)])
KEPT = KeptResponse("anna", b"{}", b"[]")


REPORT = RequestReport("r", [])


async def report_to(asker: str | None, name: str) -> RequestReport | None:
    return REPORT if (asker, name) in (("anna", "r"), (None, "r")) else None


@asynccontextmanager
async def beside(
    answer: Callable[[object], Awaitable[object]],
) -> AsyncIterator[tuple[Siblings, Channel]]:
    """A process's end, and the parent's, which answers like this."""

    async def assignment_first(question: object) -> object:
        return ASSIGNMENT if isinstance(question, AskAssignment) else await answer(question)

    ours, theirs = socket.socketpair()
    parent = Channel(ours, assignment_first)
    await parent.open()
    process = Siblings(theirs.detach())
    await process.begin()
    assert process.assignment == ASSIGNMENT
    kept = KeptResponses()
    kept.keep("resp_1", KEPT)
    process.serve(lambda: STATE, lambda: [FAMILY], kept, report_to)
    yield process, parent
    await process.close()
    await parent.close()


async def test_a_process_replies_to_the_parent() -> None:
    async def nothing(question: object) -> object:
        return None

    async with beside(nothing) as (_, parent):
        assert await parent.ask(AskState(), ProcessState) == STATE
        assert await parent.ask(AskMetrics(), list[Family]) == [FAMILY]
        maybe: Any = KeptResponse | None
        for asker, name, found in (("anna", "resp_1", KEPT), ("ben", "resp_1", None)):
            assert await parent.ask(FindResponse(asker, name), maybe) == found
        report: Any = RequestReport | None
        for who, found_report in (("anna", REPORT), (None, REPORT), ("ben", None)):
            assert await parent.ask(FindRequest(who, "r"), report) == found_report
        for asker, is_gone in (("ben", False), ("anna", True), ("anna", False)):
            assert await parent.ask(DeleteResponse(asker, "resp_1"), bool) == is_gone


@pytest.mark.parametrize("is_complete", [True, False])
async def test_calls_to_all_processes(is_complete: bool) -> None:
    async def answer(question: object) -> Any:
        assert isinstance(question, AskAll)
        match question.question:
            case AskState():
                return Answers([STATE, STATE], is_complete=True)
            case AskMetrics():
                return Answers([[], [FAMILY]], is_complete=True)
            case FindResponse(_, name):
                found = [None, KEPT if name == "resp_2" else None]
                return Answers(found, is_complete=is_complete)
            case FindRequest(_, name):
                found_report = [None, REPORT if name == "resp_2" else None]
                return Answers(found_report, is_complete=is_complete)
            case DeleteResponse(_, name):
                return Answers([False, name == "resp_2"], is_complete=is_complete)

    async with beside(answer) as (process, _):
        assert await process.states() == [STATE, STATE]
        assert await process.metrics() == [[], [FAMILY]]
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
        metrics = asyncio.create_task(process.metrics())
        await parent.close()
        with pytest.raises(HttpError) as caught:
            await metrics
        assert (caught.value.status, caught.value.code) == (503, "overloaded")
        assert await process.states() == []
