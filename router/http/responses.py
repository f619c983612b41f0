"""Endpoints of kept responses: get one, list its input, delete it."""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from router.api.errors import invalid
from router.api.responses.store import KeptResponse, KeptResponses, list_items, previous_id
from router.http.asgi import HttpExchange
from router.http.limits import Threads
from router.processes.siblings import Siblings


class ResponseHandlers:
    """The handlers of /v1/responses/{response}; `exchange.named` is the id."""

    def __init__(
        self, kept: KeptResponses, threads: Threads, siblings: Siblings | None = None
    ) -> None:
        self._kept = kept
        self._threads = threads
        self._siblings = siblings

    async def previous(self, exchange: HttpExchange, raw: bytes) -> KeptResponse | None:
        """Return the response that a body goes on from; None if there is none."""
        name = await self._threads.run(exchange, len(raw), partial(previous_id, raw))
        return await self._get(exchange.asker, name) if name else None

    async def show(self, exchange: HttpExchange) -> None:
        """GET /v1/responses/{response}."""
        if _query(exchange).get("stream", "false") != "false":
            raise invalid("stream", "is not supported: only a response that is begun is streamed")
        await exchange.respond(200, (await self._find(exchange)).answer)

    async def input_items(self, exchange: HttpExchange) -> None:
        """GET /v1/responses/{response}/input_items."""
        kept, query = await self._find(exchange), _query(exchange)
        page = await self._threads.run(exchange, len(kept.input), partial(_page, kept, query))
        await exchange.respond(200, page)

    async def delete(self, exchange: HttpExchange) -> None:
        """DELETE /v1/responses/{response}."""
        asker, name = exchange.asker, exchange.named
        is_gone = self._kept.pop(asker, name)
        if not is_gone and self._siblings is not None:
            is_gone = await self._siblings.delete(asker, name)
        if not is_gone:
            raise self._kept.missing(name)
        await exchange.reply({"id": exchange.named, "object": "response", "deleted": True})

    async def cancel(self, exchange: HttpExchange) -> None:
        """POST /v1/responses/{response}/cancel: what can be found is over."""
        await self._find(exchange)
        raise invalid(
            None,
            "Cannot cancel a synchronous response, and there are no others here: to end an answer "
            "before its end, close its connection (background is not supported)",
        )

    async def _find(self, exchange: HttpExchange) -> KeptResponse:
        kept = await self._get(exchange.asker, exchange.named)
        if kept is None:
            raise self._kept.missing(exchange.named)
        return kept

    async def _get(self, asker: str, name: str) -> KeptResponse | None:
        kept = self._kept.get(asker, name)
        if kept is None and self._siblings is not None:
            kept = await self._siblings.find(asker, name)
        return kept


def _query(exchange: HttpExchange) -> dict[str, str]:
    return dict(parse_qsl(exchange.scope["query_string"].decode("latin-1")))


def _page(kept: KeptResponse, query: dict[str, str]) -> bytes:
    page: dict[str, Any] = list_items(kept, query)
    return msgspec.json.encode(page)
