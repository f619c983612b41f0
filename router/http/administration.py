"""Handlers that drain workers and restart the router: for operators, not for clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from router.api.errors import HttpError
from router.core.fleet import Fleet, Worker, WorkerState
from router.http.asgi import HttpExchange, check_api_key
from wire.errors import shown
from wire.frames import DrainAsk
from wire.process.api_keys import ApiKeys

# Returns why the router could not be restarted, or "".
Restart = Callable[[], Awaitable[str]]
_FOR_OPERATORS: Final = "this is for operators: "


@dataclass(eq=False, repr=False)
class Administration:
    """The handlers of /v1/workers/{worker}/drain and /restart, and of /v1/router/restart.

    With `keys`, only they may.  Without, everybody may if `is_open`.
    """

    fleet: Fleet
    ask_to_drain: Callable[[Worker, DrainAsk], None]
    restart: Restart
    keys: ApiKeys | None = None
    is_open: bool = False

    async def drain(self, exchange: HttpExchange) -> None:
        """POST /v1/workers/{worker}/drain: the worker finishes its requests and ends."""
        await self._ask(exchange, DrainAsk.LEAVE)

    async def restart_worker(self, exchange: HttpExchange) -> None:
        """POST /v1/workers/{worker}/restart: the same, and whoever started it starts it again."""
        await self._ask(exchange, DrainAsk.RESTART)

    async def restart_router(self, exchange: HttpExchange) -> None:
        """POST /v1/router/restart: responds when new processes serve instead of the old ones."""
        self.check(exchange)
        if problem := await self.restart():
            raise HttpError(500, problem, code="restart_failed")
        await exchange.reply({"status": "restarted"})

    async def _ask(self, exchange: HttpExchange, ask: DrainAsk) -> None:
        self.check(exchange)
        worker = next((it for it in self.fleet.live if it.name == exchange.named), None)
        if worker is None:
            names = ", ".join(sorted(it.name for it in self.fleet.live)[:16])
            raise HttpError(
                404,
                f"there is no worker {shown(exchange.named)} here; there is {names or 'none'}",
                code="worker_not_found",
            )
        if worker.state is not WorkerState.DRAINING:
            self.ask_to_drain(worker, ask)
        body = {"worker": worker.name, "epoch": worker.epoch, "placed": len(worker.attempts)}
        await exchange.reply(body)

    def check(self, exchange: HttpExchange) -> None:
        """Raise HttpError 403 unless the request comes from an operator."""
        if self.keys is None:
            if not self.is_open:
                raise _forbidden("start the router with --admin-keys FILE, and send a key of it")
            return
        try:
            check_api_key(exchange.scope, self.keys)
        except HttpError:
            raise _forbidden("send one of the keys in the file of --admin-keys") from None


def _forbidden(advice: str) -> HttpError:
    return HttpError(403, _FOR_OPERATORS + advice, code="admin_only")
