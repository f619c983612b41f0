"""Validates the structures (constraints on the output) of requests in threads, and caches results.

Validation takes up to a third of a second, so the threads are shared fairly between clients.  A
client that keeps sending new structures evicts only its own results (`wire.process.fair_cache`).
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

# The number of cached results.  A structure has at most 64 Ki characters.
NUM_KEPT: Final = 128

Result = Structure | HttpError


class Structures:
    """The validations in progress and the cached results of the latest ones."""

    def __init__(self, threads: FairThreads) -> None:
        self._results: FairCache[tuple[str, ...], Result] = FairCache(threads, NUM_KEPT)
        self._num_waiting: Counter[Future[Result]] = Counter()

    async def validate(self, exchange: HttpExchange, wanted: Wanted) -> Structure:
        """Return the validated structure.

        Raises:
            HttpError: 400 if the structure is not valid.
            WireError: OVERLOADED, if too much work of this client is queued.
            Disconnected: The client disconnected before the result.
        """
        # Keys with a salt of their own do not find out what structures others have sent.
        key = exchange.cache_salt(""), wanted.param, wanted.kind, wanted.text
        checked = self._results.get(exchange.client_id, key, partial(_check, wanted))
        if not checked.done():
            await self._wait(exchange, checked)
        result = checked.result()
        if isinstance(result, HttpError):
            raise result.with_traceback(None)  # without this, its traceback would grow each time
        return result

    async def _wait(self, exchange: HttpExchange, checked: Future[Result]) -> None:
        """Wait for a validation; cancel it when no request waits for it any more."""
        self._num_waiting[checked] += 1
        try:
            await exchange.while_connected(asyncio.shield(asyncio.wrap_future(checked)))
        finally:
            self._num_waiting[checked] -= 1
            if not self._num_waiting[checked]:
                del self._num_waiting[checked]
                checked.cancel()


def _check(wanted: Wanted) -> Result:
    try:
        return wanted.to_structure()
    except HttpError as error:
        return error
