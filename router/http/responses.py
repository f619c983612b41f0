"""What one can do with the responses that are kept: see them, list their input, delete them."""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from router.api.errors import invalid
from router.api.responses.kept import KeptResponse, KeptResponses, list_items
from router.http.asgi import HttpExchange
from router.http.limits import Threads


class ResponseHandlers:
    """The handlers of /v1/responses/{response}; `exchange.named` is the id."""

    def __init__(self, kept: KeptResponses, threads: Threads) -> None:
        self._kept = kept
        self._threads = threads

    async def show(self, exchange: HttpExchange) -> None:
        """GET /v1/responses/{response}."""
        if _query(exchange).get("stream", "false") != "false":
            raise invalid("stream", "is not supported: only a response that is begun is streamed")
        await exchange.respond(200, self._find(exchange).answer)

    async def input_items(self, exchange: HttpExchange) -> None:
        """GET /v1/responses/{response}/input_items."""
        kept, query = self._find(exchange), _query(exchange)
        page = await self._threads.run(len(kept.input), partial(_page, kept, query))
        await exchange.respond(200, page)

    async def delete(self, exchange: HttpExchange) -> None:
        """DELETE /v1/responses/{response}."""
        self._kept.delete(exchange.asker, exchange.named)
        await exchange.reply({"id": exchange.named, "object": "response", "deleted": True})

    async def cancel(self, exchange: HttpExchange) -> None:
        """POST /v1/responses/{response}/cancel: what can be found is over."""
        self._find(exchange)
        raise invalid(
            None,
            "Cannot cancel a synchronous response, and there are no others here: to end an answer "
            "before its end, close its connection (background is not supported)",
        )

    def _find(self, exchange: HttpExchange) -> KeptResponse:
        return self._kept.find(exchange.asker, exchange.named)


def _query(exchange: HttpExchange) -> dict[str, str]:
    return dict(parse_qsl(exchange.scope["query_string"].decode("latin-1")))


def _page(kept: KeptResponse, query: dict[str, str]) -> bytes:
    page: dict[str, Any] = list_items(kept, query)
    return msgspec.json.encode(page)
