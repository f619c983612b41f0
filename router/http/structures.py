"""Checks the structures of requests: in threads, each once; what is known is answered at once.

A check takes up to a third of a second, so clients take turns, as for large bodies.  The verdict is
kept, and a client that sends ever new structures pushes out its own (`wire.process.fair_cache`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future
from functools import partial
from typing import Final

from router.api.errors import HttpError
from router.api.requests.structures import Wanted
from router.http.asgi import HttpExchange
from wire.options import Structure
from wire.process.fair_cache import FairCache
from wire.process.fair_threads import FairThreads

# Each has 64 Ki characters at most.
NUM_KEPT: Final = 128

Verdict = Structure | HttpError


class Structures:
    """The structures that are being checked, and those that were checked last."""

    def __init__(self, threads: FairThreads) -> None:
        # By what a structure was made from; its text has all of the tools in it.
        self._verdicts: FairCache[tuple[str, str, str], Verdict] = FairCache(threads, NUM_KEPT)
        self._num_waiting: Counter[Future[Verdict]] = Counter()

    async def settle(self, exchange: HttpExchange, wanted: Wanted) -> Structure:
        """Return what `Wanted.settle` does.

        Raises:
            HttpError: 400; no answer can be held to it.
            WireError: OVERLOADED; too much work of this client waits.
            Disconnected: The client left before.
        """
        key = wanted.param, wanted.kind, wanted.text
        checked = self._verdicts.ask(exchange.asker, key, partial(_check, wanted))
        if not checked.done():
            await self._wait(exchange, checked)
        verdict = checked.result()
        if isinstance(verdict, HttpError):
            raise verdict.with_traceback(None)  # which would grow each time
        return verdict

    async def _wait(self, exchange: HttpExchange, checked: Future[Verdict]) -> None:
        self._num_waiting[checked] += 1
        try:
            await exchange.unless_left(asyncio.shield(asyncio.wrap_future(checked)))
        finally:
            self._num_waiting[checked] -= 1
            if not self._num_waiting[checked]:
                del self._num_waiting[checked]
                checked.cancel()  # which changes nothing once it is checked


def _check(wanted: Wanted) -> Verdict:
    try:
        return wanted.settle()
    except HttpError as error:
        return error
