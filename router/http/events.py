"""`GET /` and `GET /v1/cluster/events`: the page, and what it shows as it happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from router.api.completions.response import HEADERS
from router.api.errors import HttpError, retry_after
from router.core.cluster import ProcessState
from router.core.dispatcher import Dispatcher
from router.http.asgi import Disconnected, HttpExchange
from router.page.activity import Activity, Watch
from router.page.board import Board
from router.page.document import document
from router.processes.siblings import Siblings

# The interval between two events.
TICK_S: Final = 1.0
# A process ceases to count when nobody has looked for this long.
IDLE_S: Final = 5.0
MAX_VIEWERS: Final = 64


class ClusterEvents:
    """Sends the same events to all viewers; computes nothing while there are none.

    A viewer who was slow to read gets a snapshot instead of what it missed, so nothing is queued.

    Args:
        about: What a snapshot says of the model.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        state: Callable[[], ProcessState],
        is_draining: Callable[[], bool],
        about: Mapping[str, Any],
        siblings: Siblings | None = None,
    ) -> None:
        self._watch = Watch(dispatcher, state, time.monotonic)
        self._is_draining = is_draining
        self._about = about
        self._siblings = siblings
        self._idle: asyncio.TimerHandle | None = None
        self._num_viewers = 0
        self._ticking: asyncio.Task[None] | None = None
        self._board = Board(about)
        # The last look: its number, its event, and the snapshot if anybody needed it.
        self._number = 0
        self._delta = self._snapshot = b""
        self._changed = asyncio.Event()

    async def page(self, exchange: HttpExchange) -> None:
        """GET /: the page, which has no data and asks for the API key if there is one."""
        body, policy = document()
        headers = (b"content-security-policy", policy), (b"cache-control", b"no-cache")
        await exchange.respond(200, body, *headers, content_type=b"text/html; charset=utf-8")

    async def events(self, exchange: HttpExchange) -> None:
        """GET /v1/cluster/events: a snapshot, then changes, until the router drains.

        A stream whose API key was revoked ends, because it would go on for days.
        """
        if self._num_viewers >= MAX_VIEWERS:
            raise HttpError(
                503,
                f"{MAX_VIEWERS} watch the cluster already; close some of the pages",
                code="overloaded",
                headers=(retry_after(),),
            )
        headers = [*HEADERS, *exchange.headers]
        await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        exchange.is_streaming = True
        with suppress(Disconnected):
            if exchange.scope["method"] != "HEAD":
                await exchange.while_connected(asyncio.ensure_future(self._follow(exchange)))
            await exchange.send({"type": "http.response.body", "body": b""})

    def look(self, since: float) -> Activity:
        """Return the activity of this process, and count from now on until nobody looks."""
        if self._idle is None:
            self._watch.start()
        else:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._stop)
        return self._watch.look(since)

    def _stop(self) -> None:
        self._idle = None
        self._watch.stop()

    async def _follow(self, exchange: HttpExchange) -> None:
        self._num_viewers += 1
        try:
            seen = -1
            if self._ticking is None:
                self._delta = b""
                self._ticking = asyncio.create_task(self._tick())
            while self._ticking is not None:
                if seen == self._number or not self._delta:
                    await self._changed.wait()
                    continue
                body = self._delta if seen + 1 == self._number else self._whole()
                seen = self._number
                if not exchange.is_allowed():
                    return
                await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
                if self._is_draining():
                    return
        finally:
            self._num_viewers -= 1

    def _whole(self) -> bytes:
        self._snapshot = self._snapshot or self._board.snapshot()
        return self._snapshot

    async def _tick(self) -> None:
        """Look at all processes, as long as there are viewers."""
        self._board, activities = Board(self._about), list[Activity]()
        try:
            while self._num_viewers:
                activities = await self._look(activities)
                self._delta, self._snapshot = self._board.update(activities), b""
                self._number += 1
                self._wake()
                await asyncio.sleep(TICK_S)
        finally:
            self._ticking = None
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _look(self, last: list[Activity]) -> list[Activity]:
        """Return what each process does now, or did at the last look if it does not reply in time.

        Nothing is lost if a process is late: its next reply has what ended since its last one.
        """
        since = min((each.now for each in last), default=0.0)
        own = self.look(since)
        if self._siblings is None:
            return [own]
        replies = await self._siblings.activities(since)
        late = [] if replies.is_complete else last
        others = {each.state.pid: each for each in (*late, *replies.given)}
        others.pop(own.state.pid, None)
        return [own, *others.values()]
