"""Checks the structures of requests in threads, and caches the verdicts.

A check takes up to a third of a second, so clients take turns.  A client that sends ever new
structures evicts its own verdicts (`wire.process.fair_cache`).
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
    """Checks that run, and the verdicts of the latest ones."""

    def __init__(self, threads: FairThreads) -> None:
        self._verdicts: FairCache[tuple[str, str, str], Verdict] = FairCache(threads, NUM_KEPT)
        self._num_waiting: Counter[Future[Verdict]] = Counter()

    async def settle(self, exchange: HttpExchange, wanted: Wanted) -> Structure:
        """Return the checked structure.

        Raises:
            HttpError: 400; the structure is not valid.
            WireError: OVERLOADED; too much work of this client waits.
            Disconnected: The client left before.
        """
        key = wanted.param, wanted.kind, wanted.text
        checked = self._verdicts.get(exchange.asker, key, partial(_check, wanted))
        if not checked.done():
            await self._wait(exchange, checked)
        verdict = checked.result()
        if isinstance(verdict, HttpError):
            raise verdict.with_traceback(None)  # or the traceback would grow each time
        return verdict

    async def _wait(self, exchange: HttpExchange, checked: Future[Verdict]) -> None:
        self._num_waiting[checked] += 1
        try:
            await exchange.unless_left(asyncio.shield(asyncio.wrap_future(checked)))
        finally:
            self._num_waiting[checked] -= 1
            if not self._num_waiting[checked]:
                del self._num_waiting[checked]
                checked.cancel()


def _check(wanted: Wanted) -> Verdict:
    try:
        return wanted.to_structure()
    except HttpError as error:
        return error
