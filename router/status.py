"""What one can ask the router about itself: models, health, cluster, metrics, version."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from router import metrics
from router.call import Call
from router.cluster import Counts, cluster, unready
from router.fleet import Fleet
from router.http import retry_after
from router.intake import Intake
from wire.aio.exposition import CONTENT_TYPE


class Status:
    """The handlers of the GET routes."""

    def __init__(
        self,
        *,
        model_name: str,
        intake: Intake,
        fleet: Fleet,
        counts: Counts,
        statistics: metrics.Metrics,
        is_draining: Callable[[], bool],
    ) -> None:
        self._model_name = model_name
        self._intake = intake
        self._fleet = fleet
        self._counts = counts
        self._statistics = statistics
        self._is_draining = is_draining
        self._created = int(time.time())
        self._version = _version()

    async def models(self, call: Call) -> None:
        """GET /v1/models."""
        await call.reply({"object": "list", "data": [self._card()]})

    async def model(self, call: Call) -> None:
        """GET /v1/models/{id}; the name may contain slashes."""
        self._intake.check_model(call.scope["path"].removeprefix("/v1/models/"))
        await call.reply(self._card())

    async def cluster(self, call: Call) -> None:
        """GET /v1/cluster."""
        await call.reply(cluster(self._fleet, self._counts, time.monotonic()))

    async def metrics(self, call: Call) -> None:
        """GET /metrics."""
        body = self._statistics.render()
        await call.respond(200, body, content_type=CONTENT_TYPE)

    async def livez(self, call: Call) -> None:
        """GET /livez: the process and its loop are alive, whatever the workers do."""
        await call.reply({"status": "alive"})

    async def readyz(self, call: Call) -> None:
        """GET /readyz and /health: a completion could be served now, or why not."""
        reasons = unready(self._fleet, is_draining=self._is_draining())
        if reasons:
            await call.reply({"status": "unready", "reasons": reasons}, 503, retry_after())
        else:
            await call.reply({"status": "ready", "reasons": []})

    async def version(self, call: Call) -> None:
        """GET /version."""
        await call.reply({"version": self._version})

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
