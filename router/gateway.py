"""The HTTP face of the router: a pure ASGI application with the routes of the OpenAI API.

Routing, the error boundary, one log line per request, and the only event-loop work of the HTTP
side: threads for long prompts, watching for clients that leave.  What is in a body is
`router.intake`, what runs is `router.exchange`, what is written is `router.delivery`.
TLS is the server's business (`router.httpserver`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog

from router import http, metrics
from router.body import Bodies
from router.call import Call, Handler
from router.delivery import Delivery, Disconnected, wait_for_disconnect, whole_body
from router.exchange import Exchange
from router.fleet import Fleet
from router.http import HttpError, Receive, Scope, Send
from router.inflight import InFlight
from router.intake import Asker, Intake, Order
from router.origin import Origins, preflight
from router.sse import ChunkWriter
from router.status import Status
from router.threads import Threads
from wire.aio.apikeys import ApiKeys
from wire.errors import ErrorCode, WireError
from wire.traffic import Traffic

log = structlog.get_logger("router")

TICK_S: Final = 1.0
# What is logged when the client left before its answer (nginx began this number; never sent).
CLIENT_CLOSED: Final = 499
# Answered without an API key: they say nothing but whether to send work here.
OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/health"})

T = TypeVar("T")


class Gateway:
    """The application; `await gateway(scope, receive, send)`.

    `draining` makes it unready and refuse new completions; those under way go on.
    """

    def __init__(
        self,
        *,
        model_name: str,
        model_path: Path,
        inflight: InFlight,
        fleet: Fleet,
        api_keys: ApiKeys | None = None,
        planes: Mapping[str, Traffic] | None = None,
        bodies: Bodies | None = None,
        origins: Origins | None = None,
    ) -> None:
        self.draining = False
        self._api_keys = api_keys
        self._bodies = bodies or Bodies()
        self._origins = origins or Origins()
        self._threads = Threads()
        self.metrics = metrics.Metrics(fleet, inflight, planes)
        self.metrics.tasks.set_function(lambda: len(asyncio.all_tasks()))
        self._model_name = model_name
        self._inflight = inflight
        self._fleet = fleet
        self._intake = Intake(model_name, model_path)
        self._deliveries: set[Delivery] = set()
        self._tick_due: float | None = None
        inflight.observers.append(self.metrics)
        self._status = status = Status(
            model_name=model_name,
            intake=self._intake,
            fleet=fleet,
            counts=inflight,
            statistics=self.metrics,
            is_draining=lambda: self.draining,
        )
        # path: (name in logs and metrics, method, handler)
        self._routes: dict[str, tuple[str, str, Handler]] = {
            "/v1/completions": ("completions", "POST", self._completions),
            "/v1/chat/completions": ("chat_completions", "POST", self._chat_completions),
            "/tokenize": ("tokenize", "POST", self._tokenize),
            "/detokenize": ("detokenize", "POST", self._detokenize),
            "/v1/models": ("models", "GET", status.models),
            "/v1/cluster": ("cluster", "GET", status.cluster),
            "/livez": ("livez", "GET", status.livez),
            "/readyz": ("readyz", "GET", status.readyz),
            "/health": ("health", "GET", status.readyz),
            "/version": ("version", "GET", status.version),
            "/metrics": ("metrics", "GET", status.metrics),
        }

    @property
    def has_text(self) -> bool:
        """Whether prompts may be text: the model has a tokenizer."""
        return self._intake.has_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await http.lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            self._start_ticking()
            fresh = secrets.token_hex(16)
            await self._serve(
                Call(scope, receive, send, http.request_id(scope, fresh), time.monotonic())
            )

    # The boundary: every error becomes an answer here, every request a line.

    async def _serve(self, call: Call) -> None:
        try:
            await self._route(call)
        except Disconnected:
            call.status, call.outcome = CLIENT_CLOSED, "cancelled"
        except HttpError as error:
            await self._refuse(call, error)
        except WireError as error:
            await self._refuse(call, http.http_error(error))
        except Exception:
            log.exception("bug", request_id=call.request_id, endpoint=call.endpoint)
            internal = WireError(ErrorCode.INTERNAL, "")
            await self._refuse(call, http.http_error(internal))
        finally:
            self._note(call)

    async def _refuse(self, call: Call, error: HttpError) -> None:
        call.status, call.outcome = error.status, error.code or "error"
        if call.delivery is not None and call.delivery.is_started:
            await call.delivery.fail(error)
        else:
            await call.respond(error.status, error.body, *error.headers)

    def _note(self, call: Call) -> None:
        self.metrics.on_response(call.endpoint, call.outcome)
        is_poll = call.scope["path"] in OPEN_PATHS  # every second, and 503 while workers start
        is_work = not is_poll and (call.scope["method"] == "POST" or call.status >= 400)
        (log.info if is_work else log.debug)(
            "request",
            face="http",
            client=call.client,
            request_id=call.request_id,
            endpoint=call.endpoint,
            status=call.status,
            outcome=call.outcome,
            **call.facts,
            total_s=round(time.monotonic() - call.started_at, 6),
        )

    async def _route(self, call: Call) -> None:
        path, method = call.scope["path"], call.scope["method"]
        if path not in OPEN_PATHS:
            call.cors = self._origins.admit(call.scope)
            if call.cors and (answer := preflight(call.scope, b"GET, HEAD, POST, OPTIONS")):
                await call.respond(200, b"", *answer)  # browsers send no key with this question
                return
            if self._api_keys is not None:
                call.key_name = http.check_api_key(call.scope, self._api_keys)
        route = self._routes.get(path)
        if route is None and path.startswith("/v1/models/"):
            route = "models", "GET", self._status.model
        if route is None:
            raise HttpError(404, f"there is no {http.shown(path)} here", code="not_found")
        call.endpoint, allowed, handler = route
        allow = (b"allow", b"GET, HEAD, OPTIONS" if allowed == "GET" else b"POST, OPTIONS")
        if method == "OPTIONS":
            await call.respond(200, b"", allow)
        elif method != allowed and (method, allowed) != ("HEAD", "GET"):
            raise HttpError(405, f"use {allowed} here", code="method_not_allowed", headers=(allow,))
        else:
            await handler(call)

    # What is asked most.

    async def _completions(self, call: Call) -> None:
        await self._complete(call, self._intake.completion)

    async def _chat_completions(self, call: Call) -> None:
        await self._complete(call, self._intake.chat)

    async def _complete(self, call: Call, read: Callable[..., Order]) -> None:
        if self.draining:
            raise WireError(ErrorCode.DRAINING, "the router is shutting down; try another one")
        order = await self._read(call, partial(read, asker=self._asker(call)))
        call.delivery = delivery = self._delivery(call)
        exchange = Exchange(
            self._inflight, order.terms, delivery, num_choices=order.body.num_choices
        )
        exchange.submit(order.requests)
        watch = asyncio.create_task(wait_for_disconnect(call.receive, delivery))
        self._deliveries.add(delivery)
        try:
            await self._deliver(call, order, exchange, delivery)
        except asyncio.CancelledError:
            if not delivery.is_cut:
                raise
            await self._drop_slow_client(call, watch)
            raise Disconnected from None
        finally:
            self._deliveries.discard(delivery)
            watch.cancel()
            exchange.cancel()
            call.note(exchange)

    async def _deliver(
        self, call: Call, order: Order, exchange: Exchange, delivery: Delivery
    ) -> None:
        body, created = order.body, int(time.time())
        completion_id = f"{'chatcmpl' if order.is_chat else 'cmpl'}-{call.request_id}"
        if not body.stream:
            pieces = await delivery.collect(exchange)
            head = {"id": completion_id, "created": created, "model": self._model_name}
            await call.respond(200, whole_body(order, exchange, pieces, head))
            return
        chunks = ChunkWriter(
            exchange,
            completion_id=completion_id,
            created=created,
            model=self._model_name,
            is_chat=order.is_chat,
            has_usage=body.wants_usage,
            has_running_usage=body.wants_usage_always,
        )
        await delivery.stream(exchange, chunks)

    def _asker(self, call: Call) -> Asker:
        # What it last was serves for saying no: a hopeless request is not to be sent again.
        max_model_len = self._fleet.last_max_model_len
        if max_model_len is None:
            raise WireError(ErrorCode.NO_WORKER, "no worker is here; try again shortly")
        return Asker(call.asker, secrets.randbits(63), max_model_len)

    def _delivery(self, call: Call) -> Delivery:
        task = asyncio.current_task()
        assert task is not None
        return Delivery(
            call.send,
            _Signal(),
            headers=call.headers,
            clock=time.monotonic,
            cut_off=task.cancel,
            on_tokens=self.metrics.on_tokens,
        )

    async def _drop_slow_client(self, call: Call, watch: asyncio.Task[None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        self.metrics.on_slow_client()
        if http.abort(call.send):
            await watch  # The server has to see its connection gone before this returns.

    def _start_ticking(self) -> None:
        if self._tick_due is None:
            loop = asyncio.get_running_loop()
            self._tick_due = loop.time() + TICK_S
            loop.call_at(self._tick_due, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._tick_due is not None
        self.metrics.on_lag(max(loop.time() - self._tick_due, 0.0))
        for delivery in tuple(self._deliveries):
            delivery.tick()
        self._tick_due = loop.time() + TICK_S
        loop.call_at(self._tick_due, self._tick, loop)

    async def _tokenize(self, call: Call) -> None:
        limit = self._fleet.last_max_model_len
        read = partial(self._intake.tokenize, max_model_len=limit)
        await call.respond(200, await self._read(call, read))

    async def _detokenize(self, call: Call) -> None:
        await call.respond(200, await self._read(call, self._intake.detokenize))

    async def _read(self, call: Call, read: Callable[[bytes], T]) -> T:
        """Return what `read` makes of the body: a long one in a thread."""
        async with self._bodies.of(call) as raw:
            return await self._threads.run(len(raw), partial(read, raw))


class _Signal:
    """An event for a single waiter that is cleared by waiting: half the price of asyncio's."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_set = False
