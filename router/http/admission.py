"""Requests begin one at a time, clients in turn, and others are served between two of them.

The event loop itself makes a small body into tokens and places the request, which takes about a
millisecond.  It does so for one request in each of its iterations.  So a thousand requests of one
client, all at once, hold up neither the first of another nor the tokens of open streams; and those
whose client leaves while they wait cost nothing.
"""

from __future__ import annotations

import asyncio

from router.http.asgi import HttpExchange
from wire.process.fair_queue import FairQueue


class Admission:
    """Lets one request begin in each iteration of the event loop."""

    def __init__(self) -> None:
        self._waiting: FairQueue[str, asyncio.Future[None]] = FairQueue()
        self._has_begun = False  # a request, in this iteration

    async def wait(self, exchange: HttpExchange) -> None:
        """Return when the request may begin; at once where no other has in this iteration.

        Raises:
            Disconnected: The client left before.
        """
        loop = asyncio.get_running_loop()
        if not self._has_begun:
            self._has_begun = True
            loop.call_soon(self._go_on)
            return
        turn = loop.create_future()
        self._waiting.add(exchange.asker, turn)
        try:
            await exchange.unless_left(turn)
        finally:
            self._waiting.remove(exchange.asker, turn)

    def _go_on(self) -> None:
        first = self._waiting.first()
        if first is None:
            self._has_begun = False
            return
        client, turn = first
        self._waiting.remove(client, turn)
        self._waiting.end_turn(client)
        if not turn.done():
            turn.set_result(None)
        asyncio.get_running_loop().call_soon(self._go_on)
