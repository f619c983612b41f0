"""Handlers for stored responses: retrieve, list input items, delete, cancel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from router.api.errors import invalid
from router.api.responses.store import KeptResponse, KeptResponses, list_items, previous_id
from router.http.asgi import HttpExchange
from router.http.limits import Threads
from router.processes.siblings import Siblings


@dataclass(eq=False, repr=False)
class ResponseHandlers:
    """The handlers of /v1/responses/{response}; `exchange.named` is the id in the path."""

    kept: KeptResponses
    threads: Threads
    siblings: Siblings | None = None

    async def previous(self, exchange: HttpExchange, raw: bytes) -> KeptResponse | None:
        """Return the response for the body's `previous_response_id`; None if it has none."""
        name = await self.threads.run(exchange, len(raw), partial(previous_id, raw))
        return await self._get(exchange.client_id, name) if name else None

    async def show(self, exchange: HttpExchange) -> None:
        if exchange.query.get("stream", "false") != "false":
            raise invalid("stream", "is not supported: only a response that is begun is streamed")
        await exchange.respond(200, (await self._find(exchange)).answer)

    async def input_items(self, exchange: HttpExchange) -> None:
        kept = await self._find(exchange)
        listed = partial(list_items, kept, exchange.query)
        await exchange.respond(200, await self.threads.run(exchange, len(kept.input), listed))

    async def delete(self, exchange: HttpExchange) -> None:
        client, name = exchange.client_id, exchange.named
        is_deleted = self.kept.pop(client, name)
        if not is_deleted and self.siblings is not None:
            is_deleted = await self.siblings.delete(client, name)
        if not is_deleted:
            raise self.kept.missing(name)
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
            raise self.kept.missing(exchange.named)
        return kept

    async def _get(self, client: str, name: str) -> KeptResponse | None:
        kept = self.kept.get(client, name)
        if kept is None and self.siblings is not None:
            kept = await self.siblings.find(client, name)
        return kept
