"""GET /v1/requests/{request}: how a recent request was served; see `router.core.history`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_address
from typing import Final

from router.api.errors import HttpError
from router.core.history.record import Record
from router.core.history.report import RequestReport, report
from router.core.history.requests import History
from router.http.asgi import HttpExchange
from router.http.limits import Threads
from router.processes.siblings import Siblings
from wire.errors import shown

# What the APIs put before the id of a request to make the id of its response.
_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_", "msg_")


class RequestHandlers:
    """The handler of /v1/requests/{request}; `exchange.named` is the id in the path.

    A client sees its own requests.  Without API keys, one on this machine sees all.
    """

    def __init__(
        self, history: History, threads: Threads, siblings: Siblings | None = None
    ) -> None:
        self._history = history
        self._threads = threads
        self._siblings = siblings

    async def show(self, exchange: HttpExchange) -> None:
        """GET /v1/requests/{request}."""
        name, client = exchange.named, None if _sees_all(exchange) else exchange.client_id
        records = self._find(name, client)
        if records:
            size = sum([record.size for record in records])
            await exchange.reply(await self._threads.run(exchange, size, _report(name, records)))
            return
        found = None if self._siblings is None else await self._siblings.request(client, name)
        if found is None:
            raise HttpError(
                404,
                f"Request with id {shown(name)} not found: it was somebody else's, gave way to "
                "later ones (--request-history), or this router has started since",
                code="request_not_found",
            )
        await exchange.reply(found)

    async def report(self, client: str | None, name: str) -> RequestReport | None:
        """Return the report for another process of the router; None if the id is not known."""
        records = self._find(name, client)
        return await asyncio.to_thread(_report(name, records)) if records else None

    def _find(self, name: str, client: str | None) -> list[Record]:
        stripped = next((name[len(it) :] for it in _PREFIXES if name.startswith(it)), name)
        return self._history.find(name, client) or self._history.find(stripped, client)


def _report(name: str, records: Sequence[Record]) -> partial[RequestReport]:
    return partial(report, name, records, time.time() - time.monotonic())


def _sees_all(exchange: HttpExchange) -> bool:
    if exchange.key_name:
        return False
    try:
        return ip_address(exchange.client).is_loopback
    except ValueError:
        return False
