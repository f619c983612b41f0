"""Requests from one router process to all others, relayed by the parent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from router.api.errors import HttpError, retry_after
from router.api.responses.store import KeptResponse
from router.core.cluster import ProcessState
from router.core.history.report import RequestReport
from router.core.replay import KeptRequest
from router.page.activity import Activity
from router.processes.channel import (
    Answers,
    Ask,
    AskActivity,
    AskAll,
    Assignment,
    Channel,
    Find,
    Listening,
    Question,
)
from router.processes.listeners import Listeners, receive
from router.processes.merged_metrics import Families

# The environment variable with two inherited file descriptors, separated by a comma: the channel to
# the parent, and the socket for listening sockets.
VARIABLE: Final = "ROUTER_CHANNEL"
# The timeout of a request: longer than the parent waits for a process that is stuck.
PATIENCE_S: Final = 5.0
# The timeout when polling states: load balancers mostly time out after a second.
STATE_PATIENCE_S: Final = 0.75
T = TypeVar("T")


class Siblings:
    """A process's channel to the parent and its sibling processes.

    Call `begin`, then set `answer`, which gets the requests of the parent and of other processes.
    """

    def __init__(self, channel: socket.socket, sockets: socket.socket) -> None:
        self._channel = Channel(channel, lambda question: self.answer(question))
        self._sockets = sockets
        self.assignment: Assignment
        self.inherited: Listeners | None = None
        self.answer: Callable[[Question], Awaitable[object]]

    async def begin(self) -> None:
        """Wait for the parent to let this process start, and store its `assignment`."""
        await self.open()
        self.assignment = await self._channel.ask(Ask.ASSIGNMENT, Assignment)
        if self.assignment.inherits:
            self.inherited = receive(self._sockets)

    async def open(self) -> None:
        """Start reading requests; a process that has no `assignment` calls this, not `begin`."""
        await self._channel.open()

    async def take_bus(self) -> list[str] | None:
        """Take the bus over; return the names of its workers, None if the predecessor is gone."""
        kind: Any = list[str] | None
        return await self._channel.ask(Ask.TAKE_BUS, kind)

    async def restart(self) -> str:
        """Have all processes replaced; return why that failed, or ""."""
        return await self._channel.ask(Ask.RESTART, str)

    async def listening(
        self, endpoints: dict[str, str], try_this: str, listeners: Listeners
    ) -> None:
        """Notify the parent that this process serves clients, and pass on these sockets."""
        listeners.send(self._sockets)
        listeners.close()
        await self._channel.ask(Listening(endpoints, try_this), bool)

    async def leave(self) -> None:
        """Notify the parent that all clients are served, and wait until no worker needs the bus."""
        await self._channel.ask(Ask.DRAINED, bool)

    async def close(self) -> None:
        await self._channel.close()
        self._sockets.close()

    async def states(self) -> list[ProcessState]:
        """Return the states of all processes that reply in time.

        Return an empty list if the parent does not respond: clients are served without it.
        """
        with suppress(HttpError):
            return (await self._ask_all(Ask.STATE, Answers[ProcessState], STATE_PATIENCE_S)).given
        return []

    async def activities(self, since: float) -> Answers[Activity]:
        """Return what all processes that reply in time do, and what ended there since a time."""
        try:
            return await self._ask_all(AskActivity(since), Answers[Activity], STATE_PATIENCE_S)
        except HttpError:
            return Answers([], is_complete=False)

    async def metrics(self) -> list[Families]:
        """Return the metrics of all processes, including this one and dead ones."""
        return (await self._ask_all(Ask.METRICS, Answers[Families])).given

    async def find(self, client: str, name: str) -> KeptResponse | None:
        """Return the stored response of this name from whichever process has it, or None."""
        return await self._find(Find("response", client, name), Answers[KeptResponse | None])

    async def request(self, client: str | None, name: str) -> RequestReport | None:
        """Return the report on a request of this client from whichever process has it, or None."""
        return await self._find(Find("report", client, name), Answers[RequestReport | None])

    async def kept_requests(self, name: str) -> list[KeptRequest] | None:
        """Return the choices of a request from whichever process keeps it for replays, or None."""
        return await self._find(Find("replay", None, name), Answers[list[KeptRequest] | None])

    async def delete(self, client: str, name: str) -> bool:
        """Delete a stored response in whichever process has it; return False if none has."""
        deleted = await self._ask_all(Find("delete", client, name), Answers[bool])
        if not (any(deleted.given) or deleted.is_complete):
            raise _not_now()
        return any(deleted.given)

    async def _find(self, question: Question, kind: type[Answers[T | None]]) -> T | None:
        answers = await self._ask_all(question, kind)
        found = next((each for each in answers.given if each is not None), None)
        if found is None and not answers.is_complete:
            raise _not_now()  # a process that did not reply may have it
        return found

    async def _ask_all(
        self, question: Question, kind: type[T], patience_s: float = PATIENCE_S
    ) -> T:
        try:
            async with asyncio.timeout(patience_s):
                return await self._channel.ask(AskAll(question), kind)
        except (TimeoutError, ConnectionError):
            raise _not_now() from None


def _not_now() -> HttpError:
    return HttpError(
        503,
        "not every process of the router can be asked just now",
        code="overloaded",
        headers=(retry_after(),),
    )


def inherited() -> Siblings | None:
    """Return the channel inherited from the parent, or None if this is the only process."""
    descriptors = os.environ.pop(VARIABLE, "")
    if not descriptors:
        return None
    return Siblings(*[socket.socket(fileno=int(each)) for each in descriptors.split(",")])
