"""Calls from one router process to all others, by way of the parent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from router.api.errors import HttpError, retry_after
from router.api.responses.store import KeptResponse, KeptResponses
from router.core.cluster import ProcessState
from router.processes.channel import (
    Answers,
    AskAll,
    AskAssignment,
    AskMetrics,
    AskState,
    Assignment,
    Channel,
    DeleteResponse,
    Drained,
    FindResponse,
    Listening,
    Question,
)
from router.processes.merged_metrics import Families

# The inherited file descriptor of a router process.
VARIABLE: Final = "ROUTER_CHANNEL"
# Longer than the parent waits for a process that is stuck.
PATIENCE_S: Final = 5.0
# For states: load balancers mostly give up after a second.
STATE_PATIENCE_S: Final = 0.75
T = TypeVar("T")


class Siblings:
    """One process's channel to the parent.  Call `begin` first, then `serve`."""

    def __init__(self, descriptor: int) -> None:
        self._channel = Channel(socket.socket(fileno=descriptor), self._answer)
        self.assignment: Assignment
        self._state: Callable[[], ProcessState]
        self._metrics: Callable[[], Families]
        self._kept: KeptResponses

    async def begin(self) -> None:
        """Wait for the `assignment`, with which this process may start."""
        await self._channel.open()
        self.assignment = await self._channel.ask(AskAssignment(), Assignment)

    def serve(
        self,
        state: Callable[[], ProcessState],
        metrics: Callable[[], Families],
        kept: KeptResponses,
    ) -> None:
        """Set the sources of replies to other processes."""
        self._state, self._metrics, self._kept = state, metrics, kept

    async def listening(self, endpoints: dict[str, str], try_this: str) -> None:
        """Tell the parent that this process serves."""
        await self._channel.ask(Listening(endpoints, try_this), bool)

    async def leave(self) -> None:
        """Tell the parent that no client is left, and wait until workers need the bus no more."""
        await self._channel.ask(Drained(), bool)

    async def close(self) -> None:
        await self._channel.close()

    async def states(self) -> list[ProcessState]:
        """Return the states that come in time; none while the parent is silent, since clients are
        served without it."""
        with suppress(HttpError):
            return (await self._ask_all(AskState(), Answers[ProcessState], STATE_PATIENCE_S)).given
        return []

    async def metrics(self) -> list[Families]:
        """Return the metrics of all processes, this one and dead ones included."""
        return (await self._ask_all(AskMetrics(), Answers[Families])).given

    async def find(self, asker: str, name: str) -> KeptResponse | None:
        """Return a response that another process stores; None if none does."""
        found = await self._ask_all(FindResponse(asker, name), Answers[KeptResponse | None])
        kept = next((each for each in found.given if each is not None), None)
        if kept is None and not found.is_complete:
            raise _not_now()  # a process that did not answer may have it
        return kept

    async def delete(self, asker: str, name: str) -> bool:
        """Delete a response in another process; False if none stores it."""
        deleted = await self._ask_all(DeleteResponse(asker, name), Answers[bool])
        if not (any(deleted.given) or deleted.is_complete):
            raise _not_now()
        return any(deleted.given)

    async def _ask_all(
        self, question: Question, kind: type[T], patience_s: float = PATIENCE_S
    ) -> T:
        try:
            async with asyncio.timeout(patience_s):
                return await self._channel.ask(AskAll(question), kind)
        except (TimeoutError, ConnectionError):
            raise _not_now() from None

    async def _answer(self, question: Question) -> object:
        match question:
            case AskState():
                return self._state()
            case AskMetrics():
                return self._metrics()
            case FindResponse(asker, name):
                return self._kept.get(asker, name)
            case DeleteResponse(asker, name):
                return self._kept.pop(asker, name)


def _not_now() -> HttpError:
    return HttpError(
        503,
        "not every process of the router can be asked just now",
        code="overloaded",
        headers=(retry_after(),),
    )


def inherited() -> Siblings | None:
    """Return the inherited channel; None if this is the only process."""
    descriptor = os.environ.pop(VARIABLE, "")
    return Siblings(int(descriptor)) if descriptor else None
