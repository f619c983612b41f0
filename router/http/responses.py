"""Handlers for stored responses: retrieve, list input items, delete, cancel."""

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
    """The handlers of /v1/responses/{response}; `exchange.named` is the id in the path."""

    def __init__(
        self, kept: KeptResponses, threads: Threads, siblings: Siblings | None = None
    ) -> None:
        self._kept = kept
        self._threads = threads
        self._siblings = siblings

    async def previous(self, exchange: HttpExchange, raw: bytes) -> KeptResponse | None:
        """Return the response for the body's `previous_response_id`; None if it has none."""
        name = await self._threads.run(exchange, len(raw), partial(previous_id, raw))
        return await self._get(exchange.client_id, name) if name else None

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
        client, name = exchange.client_id, exchange.named
        is_deleted = self._kept.pop(client, name)
        if not is_deleted and self._siblings is not None:
            is_deleted = await self._siblings.delete(client, name)
        if not is_deleted:
            raise self._kept.missing(name)
        await exchange.reply({"id": exchange.named, "object": "response", "deleted": True})

    async def cancel(self, exchange: HttpExchange) -> None:
        """POST /v1/responses/{response}/cancel: an error, since every stored response has ended."""
        await self._find(exchange)
        raise invalid(
            None,
            "Cannot cancel a synchronous response, and there are no others here: to end an answer "
            "before its end, close its connection (background is not supported)",
        )

    async def _find(self, exchange: HttpExchange) -> KeptResponse:
        kept = await self._get(exchange.client_id, exchange.named)
        if kept is None:
            raise self._kept.missing(exchange.named)
        return kept

    async def _get(self, client: str, name: str) -> KeptResponse | None:
        kept = self._kept.get(client, name)
        if kept is None and self._siblings is not None:
            kept = await self._siblings.find(client, name)
        return kept


def _query(exchange: HttpExchange) -> dict[str, str]:
    return dict(parse_qsl(exchange.scope["query_string"].decode("latin-1")))


def _page(kept: KeptResponse, query: dict[str, str]) -> bytes:
    page: dict[str, Any] = list_items(kept, query)
    return msgspec.json.encode(page)
