"""GET /v1/requests/{request}: how a recent request was served; see `router.core.history`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from router.api.errors import HttpError
from router.core.history.record import Record
from router.core.history.report import RequestReport, report
from router.core.history.requests import History
from router.http.asgi import HttpExchange
from router.http.limits import Threads
from router.http.origin import is_loopback
from router.processes.siblings import Siblings
from wire.errors import shown

# What the APIs put before the id of a request to make the id of its response.
_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_", "msg_")


@dataclass(eq=False, repr=False)
class RequestHandlers:
    """The handler of /v1/requests/{request}; `exchange.named` is the id in the path.

    A client sees its own requests.  Without API keys, one on this machine sees all.
    """

    history: History
    threads: Threads
    siblings: Siblings | None = None

    async def show(self, exchange: HttpExchange) -> None:
        sees_all = not exchange.key_name and is_loopback(exchange.client)
        name, client = exchange.named, None if sees_all else exchange.client_id
        records = find(self.history, name, client)
        if records:
            size = sum([record.size for record in records])
            await exchange.reply(
                await self.threads.run(exchange, size, self._report(client, name, records))
            )
            return
        found = None if self.siblings is None else await self.siblings.request(client, name)
        if found is None:
            raise HttpError(
                404,
                f"Request with id {shown(name)} not found: it is another client's, was dropped "
                "for later ones (--request-history), or the router was restarted since",
                code="request_not_found",
            )
        await exchange.reply(found)

    async def report(self, client: str | None, name: str) -> RequestReport | None:
        """Return the report for another process of the router; None if the id is not known."""
        records = find(self.history, name, client)
        return await asyncio.to_thread(self._report(client, name, records)) if records else None

    def _report(
        self, client: str | None, name: str, records: Sequence[Record]
    ) -> partial[RequestReport]:
        epoch_s, name_of = time.time() - time.monotonic(), partial(self.history.name_of, client)
        return partial(report, name, records, epoch_s, name_of)


def find(history: History, name: str, client: str | None = None) -> list[Record]:
    """Return the records of a request or a response with this id, of a client or of any (None)."""
    stripped = next((name[len(it) :] for it in _PREFIXES if name.startswith(it)), name)
    return history.find(name, client) or history.find(stripped, client)
