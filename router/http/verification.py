"""POST /v1/requests/{request}/verify: replays a kept request on other workers, for operators.

No response has a prompt or an answer, only the first token that differs.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from functools import partial
from typing import Final

from router.api.errors import HttpError, invalid
from router.core.dispatcher import Dispatcher
from router.core.replay import (
    Comparison,
    KeptRequest,
    ReplayedChoice,
    Verification,
    kept_requests,
    workers_to_exclude,
)
from router.http.administration import Administration
from router.http.asgi import HttpExchange
from router.http.requests import find
from router.processes.siblings import Siblings
from wire.errors import shown

_NOT_KEPT: Final = (
    "cannot be replayed: it still runs, no request of its client is kept (--keep-requests), it was "
    "dropped for later ones (--request-history, --request-history-bytes), or the router was "
    "restarted since"
)


@dataclass(eq=False, repr=False)
class Verifications:
    """The handler of /v1/requests/{request}/verify; `exchange.named` is the id in the path."""

    dispatcher: Dispatcher
    administration: Administration
    siblings: Siblings | None = None

    async def verify(self, exchange: HttpExchange) -> None:
        """POST /v1/requests/{request}/verify: compares the choices one after another."""
        self.administration.check(exchange)
        name = exchange.named
        if (wanted := exchange.query.get("same_worker", "false")) not in ("true", "false"):
            raise invalid("same_worker", "must be true or false")
        kept = await self.find(name)
        if kept is None and self.siblings is not None:
            kept = await self.siblings.kept_requests(name)
        if kept is None:
            message = f"Request with id {shown(name)} {_NOT_KEPT}"
            raise HttpError(404, message, code="request_not_kept")
        choices = [await self._replay(exchange, each, wanted == "true") for each in kept]
        await exchange.reply(Verification(name, all(it.equal for it in choices), choices))

    async def find(self, name: str) -> list[KeptRequest] | None:
        """Return the kept requests of this id, also for other processes; None without."""
        history = self.dispatcher.history
        return kept_requests([it for it in find(history, name) if history.keeps(it.client)]) or None

    async def _replay(
        self, exchange: HttpExchange, kept: KeptRequest, same_worker: bool
    ) -> ReplayedChoice:
        local_prefill = self.dispatcher.history.local_prefill
        excluded = workers_to_exclude(
            kept, self.dispatcher.fleet, local_prefill=local_prefill, same_worker=same_worker
        )
        if excluded is None:
            message = "no other workers are ready: start some, or use baton verify --same-worker"
            if same_worker:
                message = "no workers that served it are ready: start them"
            raise HttpError(409, message, code="no_worker_to_verify")
        is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        comparison = Comparison(kept, partial(_settle, is_over))
        salt = secrets.token_hex(16)
        request = kept.replay(exchange.client_id, exchange.request_id, salt, excluded)
        handle = self.dispatcher.submit(request, comparison)
        try:
            await exchange.while_connected(is_over)
        finally:
            self.dispatcher.cancel(handle)  # after the first difference it would go on
        if comparison.error is not None:
            raise comparison.error
        return comparison.result()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
