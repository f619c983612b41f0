"""The other router processes of this machine, as one of them knows them: by way of the parent.

Requests may arrive at any of them, so what one asks of the router as a whole is asked of all.
"""

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

# The number of the descriptor that a router process inherits.
VARIABLE: Final = "ROUTER_CHANNEL"
# For the parent's answer, which itself waits less than that for a process that is stuck.
PATIENCE_S: Final = 5.0
# The same for how all processes are: a load balancer that asks gives up after a second, mostly.
STATE_PATIENCE_S: Final = 0.75
T = TypeVar("T")


class Siblings:
    """One process's channel to the parent.  `begin` first; `serve` says what it answers itself."""

    def __init__(self, descriptor: int) -> None:
        self._channel = Channel(socket.socket(fileno=descriptor), self._answer)
        self.assignment: Assignment
        self._state: Callable[[], ProcessState]
        self._metrics: Callable[[], Families]
        self._kept: KeptResponses

    async def begin(self) -> None:
        """Wait until this process may begin, and has its `assignment`."""
        await self._channel.open()
        self.assignment = await self._channel.ask(AskAssignment(), Assignment)

    def serve(
        self,
        state: Callable[[], ProcessState],
        metrics: Callable[[], Families],
        kept: KeptResponses,
    ) -> None:
        """Answer the others with these."""
        self._state, self._metrics, self._kept = state, metrics, kept

    async def listening(self, endpoints: dict[str, str], try_this: str) -> None:
        """Tell the parent that this process serves."""
        await self._channel.ask(Listening(endpoints, try_this), bool)

    async def leave(self) -> None:
        """Tell the parent that no client is left, and wait until workers need the bus no more."""
        await self._channel.ask(Drained(), bool)

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()

    async def states(self) -> list[ProcessState]:
        """Return how those processes are that say so soon; none while the parent is silent.

        Who asks is to go on by what it knows itself: clients are served without the parent.
        """
        with suppress(HttpError):
            return (await self._ask_all(AskState(), Answers[ProcessState], STATE_PATIENCE_S)).given
        return []

    async def metrics(self) -> list[Families]:
        """Return what all processes have measured, this one and those that died included."""
        return (await self._ask_all(AskMetrics(), Answers[Families])).given

    async def find(self, asker: str, name: str) -> KeptResponse | None:
        """Return a response that another process keeps; None if none does."""
        found = await self._ask_all(FindResponse(asker, name), Answers[KeptResponse | None])
        kept = next((each for each in found.given if each is not None), None)
        if kept is None and not found.is_complete:
            raise _not_now()  # it may be where nobody answers
        return kept

    async def delete(self, asker: str, name: str) -> bool:
        """Have another process forget a response; False if none keeps it."""
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
    """Return the channel that this process was started with; None where it is the only one."""
    descriptor = os.environ.pop(VARIABLE, "")
    return Siblings(int(descriptor)) if descriptor else None
