"""What one can ask the router about itself: models, health, cluster, metrics, version."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from router import metrics
from router.core.cluster import Counts, cluster, unready
from router.core.fleet import Fleet
from router.http.asgi import HttpExchange, retry_after
from router.http.requests import RequestParser
from wire.process.exposition import CONTENT_TYPE


class Status:
    """The handlers of the GET routes."""

    def __init__(
        self,
        *,
        model_name: str,
        parser: RequestParser,
        fleet: Fleet,
        counts: Counts,
        statistics: metrics.Metrics,
        is_draining: Callable[[], bool],
    ) -> None:
        self._model_name = model_name
        self._parser = parser
        self._fleet = fleet
        self._counts = counts
        self._statistics = statistics
        self._is_draining = is_draining
        self._created = int(time.time())
        self._version = _version()

    async def models(self, exchange: HttpExchange) -> None:
        """GET /v1/models."""
        await exchange.reply({"object": "list", "data": [self._card()]})

    async def model(self, exchange: HttpExchange) -> None:
        """GET /v1/models/{id}; the name may contain slashes."""
        self._parser.check_model(exchange.scope["path"].removeprefix("/v1/models/"))
        await exchange.reply(self._card())

    async def cluster(self, exchange: HttpExchange) -> None:
        """GET /v1/cluster."""
        await exchange.reply(cluster(self._fleet, self._counts, time.monotonic()))

    async def metrics(self, exchange: HttpExchange) -> None:
        """GET /metrics."""
        body = self._statistics.render()
        await exchange.respond(200, body, content_type=CONTENT_TYPE)

    async def livez(self, exchange: HttpExchange) -> None:
        """GET /livez: the process and its loop are alive, whatever the workers do."""
        await exchange.reply({"status": "alive"})

    async def readyz(self, exchange: HttpExchange) -> None:
        """GET /readyz and /health: a completion could be served now, or why not."""
        reasons = unready(self._fleet, is_draining=self._is_draining())
        if reasons:
            await exchange.reply({"status": "unready", "reasons": reasons}, 503, retry_after())
        else:
            await exchange.reply({"status": "ready", "reasons": []})

    async def version(self, exchange: HttpExchange) -> None:
        """GET /version."""
        await exchange.reply({"version": self._version})

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": self._fleet.max_model_len,
        }


def _version() -> str:
    try:
        return metadata.version("baton-serve")
    except metadata.PackageNotFoundError:  # Run from a checkout that is not installed.
        return "unknown"
