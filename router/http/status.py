"""Handlers for GET: models, health, cluster, load, metrics, version, docs.

`/v1/requests` is in `router.http.requests`, stored responses are in `router.http.responses`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from typing import Any

import msgspec

from router import metrics
from router.api.errors import retry_after
from router.api.model import ServedModel
from router.api.openapi.document import document
from router.api.openapi.page import POLICY, page
from router.core.cluster import ProcessState, reasons_of, state_of, together
from router.core.dispatcher import Dispatcher
from router.http.asgi import HttpExchange
from router.processes.siblings import Siblings
from wire.process.exposition import CONTENT_TYPE


@dataclass(eq=False, repr=False)
class Status:
    """The handlers that tell the state of the router, its model and its workers."""

    served: ServedModel
    dispatcher: Dispatcher
    statistics: metrics.Metrics
    is_draining: Callable[[], bool]
    siblings: Siblings | None = None

    def __post_init__(self) -> None:
        self._created = int(time.time())
        self._version = _version()
        api_documents()  # fills the cache: too slow for the first request

    async def models(self, exchange: HttpExchange) -> None:
        """GET /v1/models: a response that is valid for OpenAI's and for Anthropic's clients."""
        name = self.served.name
        page = {"has_more": False, "first_id": name, "last_id": name}
        await exchange.reply({"object": "list", "data": [self._card()]} | page)

    async def model(self, exchange: HttpExchange) -> None:
        self.served.check_name(exchange.named)
        await exchange.reply(self._card())

    async def cluster(self, exchange: HttpExchange) -> None:
        are_several = self.siblings is not None
        await exchange.reply(together(await self._states(), are_several=are_several))

    async def metrics(self, exchange: HttpExchange) -> None:
        processes = None if self.siblings is None else await self.siblings.metrics()
        body = self.statistics.render(processes)
        await exchange.respond(200, body, content_type=CONTENT_TYPE)

    async def livez(self, exchange: HttpExchange) -> None:
        """GET /livez: always succeeds, with or without workers."""
        await exchange.reply({"status": "alive"})

    async def readyz(self, exchange: HttpExchange) -> None:
        """GET /readyz, /health and /ping: whether completions can be served, or why not."""
        # All processes must be ready, because any of them may get the next completion.
        reasons = reasons_of(await self._states())
        if reasons:
            await exchange.reply({"status": "unready", "reasons": reasons}, 503, retry_after())
        else:
            await exchange.reply({"status": "ready", "reasons": []})

    async def load(self, exchange: HttpExchange) -> None:
        """GET /load: the number of open requests, as in vLLM."""
        load = sum([state.running + state.waiting for state in await self._states()])
        await exchange.reply({"server_load": load})

    async def openapi(self, exchange: HttpExchange) -> None:
        await exchange.respond(200, api_documents()[0])

    async def docs(self, exchange: HttpExchange) -> None:
        policy = (b"content-security-policy", POLICY)
        await exchange.respond(
            200, api_documents()[1], policy, content_type=b"text/html; charset=utf-8"
        )

    async def version(self, exchange: HttpExchange) -> None:
        await exchange.reply({"version": self._version})

    def state(self) -> ProcessState:
        is_draining = self.is_draining()
        return state_of(self.dispatcher, time.monotonic(), is_draining=is_draining)

    async def _states(self) -> list[ProcessState]:
        """Return the states of all processes that respond, this one first."""
        own = self.state()
        if self.siblings is None:
            return [own]
        others = await self.siblings.states()
        return [own, *(each for each in others if each.pid != own.pid)]

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": self.dispatcher.fleet.max_model_len,
            "vocab_size": self.served.vocab_size,
            # For Anthropic's clients.
            "type": "model",
            "display_name": self.served.name,
            "created_at": datetime.fromtimestamp(self._created, UTC),
            "lifecycle": "active",
            "max_input_tokens": self.dispatcher.fleet.max_model_len,
        }


@cache
def api_documents() -> tuple[bytes, bytes]:
    """Return the OpenAPI document as JSON, and as an HTML page."""
    api = document()
    return msgspec.json.encode(api), page(api).encode()


def _version() -> str:
    try:
        return metadata.version("baton-serve")
    except metadata.PackageNotFoundError:  # run from a checkout, not installed
        return "unknown"
