"""Requests from one router process to all others, relayed by the parent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar

from router.api.errors import HttpError, retry_after
from router.api.responses.store import KeptResponse, KeptResponses
from router.core.cluster import ProcessState
from router.core.history.report import RequestReport
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
    FindRequest,
    FindResponse,
    Listening,
    Question,
)
from router.processes.merged_metrics import Families

# The environment variable with the inherited file descriptor of the channel to the parent.
VARIABLE: Final = "ROUTER_CHANNEL"
# The timeout of a request: longer than the parent waits for a process that is stuck.
PATIENCE_S: Final = 5.0
# The timeout when polling states: load balancers mostly time out after a second.
STATE_PATIENCE_S: Final = 0.75
T = TypeVar("T")
FindReport = Callable[[str | None, str], Awaitable[RequestReport | None]]


class Siblings:
    """A process's channel to the parent and its sibling processes.  Call `begin`, then `serve`."""

    def __init__(self, descriptor: int) -> None:
        self._channel = Channel(socket.socket(fileno=descriptor), self._answer)
        self.assignment: Assignment
        self._state: Callable[[], ProcessState]
        self._metrics: Callable[[], Families]
        self._kept: KeptResponses
        self._request: FindReport

    async def begin(self) -> None:
        """Wait for the parent to let this process start, and store its `assignment`."""
        await self._channel.open()
        self.assignment = await self._channel.ask(AskAssignment(), Assignment)

    def serve(
        self,
        state: Callable[[], ProcessState],
        metrics: Callable[[], Families],
        kept: KeptResponses,
        request: FindReport,
    ) -> None:
        """Set the sources from which requests of other processes are answered."""
        self._state, self._metrics, self._kept, self._request = state, metrics, kept, request

    async def listening(self, endpoints: dict[str, str], try_this: str) -> None:
        """Notify the parent that this process serves clients."""
        await self._channel.ask(Listening(endpoints, try_this), bool)

    async def leave(self) -> None:
        """Notify the parent that all clients are served, and wait until no worker needs the bus."""
        await self._channel.ask(Drained(), bool)

    async def close(self) -> None:
        await self._channel.close()

    async def states(self) -> list[ProcessState]:
        """Return the states of all processes that reply in time.

        Return an empty list if the parent does not respond: clients are served without it.
        """
        with suppress(HttpError):
            return (await self._ask_all(AskState(), Answers[ProcessState], STATE_PATIENCE_S)).given
        return []

    async def metrics(self) -> list[Families]:
        """Return the metrics of all processes, including this one and dead ones."""
        return (await self._ask_all(AskMetrics(), Answers[Families])).given

    async def find(self, client: str, name: str) -> KeptResponse | None:
        """Return the stored response of this name from whichever process has it, or None."""
        found = await self._ask_all(FindResponse(client, name), Answers[KeptResponse | None])
        kept = next((each for each in found.given if each is not None), None)
        if kept is None and not found.is_complete:
            raise _not_now()  # a process that did not reply may have it
        return kept

    async def request(self, client: str | None, name: str) -> RequestReport | None:
        """Return the report on a request of this client from whichever process has it, or None."""
        found = await self._ask_all(FindRequest(client, name), Answers[RequestReport | None])
        known = next((each for each in found.given if each is not None), None)
        if known is None and not found.is_complete:
            raise _not_now()
        return known

    async def delete(self, client: str, name: str) -> bool:
        """Delete a stored response in whichever process has it; return False if none has."""
        deleted = await self._ask_all(DeleteResponse(client, name), Answers[bool])
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
            case FindRequest(asker, name):
                return await self._request(asker, name)
            case FindResponse(client, name):
                return self._kept.get(client, name)
            case DeleteResponse(client, name):
                return self._kept.pop(client, name)


def _not_now() -> HttpError:
    return HttpError(
        503,
        "not every process of the router can be asked just now",
        code="overloaded",
        headers=(retry_after(),),
    )


def inherited() -> Siblings | None:
    """Return the channel inherited from the parent, or None if this is the only process."""
    descriptor = os.environ.pop(VARIABLE, "")
    return Siblings(int(descriptor)) if descriptor else None
