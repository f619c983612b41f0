"""The ASGI application: routes, the one place where errors become answers, one log line a request.

A completion passes through it in four steps: `router.http.limits` reads the body,
`router.http.requests` makes requests to the core of it, `router.http.completion` submits them, and
`router.http.writer` sends what they bring.  While that runs, a task watches for the client to
leave.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog

from router import metrics
from router.core.dispatcher import Dispatcher
from router.core.fleet import Fleet
from router.http import asgi
from router.http.asgi import Disconnected, HttpError, HttpExchange, Receive, Scope, Send
from router.http.completion import Completion, CompletionRequest
from router.http.limits import Bodies, Threads
from router.http.origin import Origins, preflight
from router.http.requests import RequestParser
from router.http.responses import size_of_scores, whole_body
from router.http.server import abort
from router.http.sse import ChunkWriter, failure
from router.http.status import Status
from router.http.writer import ResponseWriter, wait_for_disconnect
from wire.errors import ErrorCode, WireError, shown
from wire.process.api_keys import ApiKeys
from wire.process.traffic import Traffic

log = structlog.get_logger("router")

# Silent streams are kept alive, and clients that do not read are looked for, this often.
TICK_S: Final = 1.0
# What is logged when the client left before its answer (nginx began this number; never sent).
CLIENT_CLOSED: Final = 499
# Answered without an API key: they say nothing but whether to send work here.
OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/health"})

Handler = Callable[[HttpExchange], Awaitable[None]]
T = TypeVar("T")


class Application:
    """The application; `await application(scope, receive, send)`.

    `draining` makes it unready and refuse new completions; those under way go on.
    """

    def __init__(
        self,
        *,
        model_name: str,
        model_path: Path,
        dispatcher: Dispatcher,
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
        self.metrics = metrics.Metrics(fleet, dispatcher, planes)
        self.metrics.tasks.set_function(lambda: len(asyncio.all_tasks()))
        self._model_name = model_name
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._parser = RequestParser(model_name, model_path)
        self._writers: set[ResponseWriter] = set()
        self._tick_due: float | None = None
        dispatcher.observers.append(self.metrics)
        self._status = status = Status(
            model_name=model_name,
            parser=self._parser,
            fleet=fleet,
            counts=dispatcher,
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
        return self._parser.has_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await asgi.lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            self._start_ticking()
            fresh = secrets.token_hex(16)
            await self._serve(
                HttpExchange(scope, receive, send, asgi.request_id(scope, fresh), time.monotonic())
            )

    # Every error becomes an answer here, and every request a line in the log.

    async def _serve(self, exchange: HttpExchange) -> None:
        try:
            await self._route(exchange)
        except Disconnected:
            exchange.status, exchange.outcome = CLIENT_CLOSED, "cancelled"
        except HttpError as error:
            await self._refuse(exchange, error)
        except WireError as error:
            await self._refuse(exchange, asgi.http_error(error))
        except Exception:
            log.exception("bug", request_id=exchange.request_id, endpoint=exchange.endpoint)
            internal = WireError(ErrorCode.INTERNAL, "")
            await self._refuse(exchange, asgi.http_error(internal))
        finally:
            self._note(exchange)

    async def _refuse(self, exchange: HttpExchange, error: HttpError) -> None:
        exchange.status, exchange.outcome = error.status, error.code or "error"
        if exchange.is_streaming:
            await exchange.send({"type": "http.response.body", "body": failure(error)})
        else:
            await exchange.respond(error.status, error.body, *error.headers)

    def _note(self, exchange: HttpExchange) -> None:
        self.metrics.on_response(exchange.endpoint, exchange.outcome)
        is_poll = exchange.scope["path"] in OPEN_PATHS  # every second, and 503 while workers start
        is_work = not is_poll and (exchange.scope["method"] == "POST" or exchange.status >= 400)
        (log.info if is_work else log.debug)(
            "request",
            face="http",
            client=exchange.client,
            request_id=exchange.request_id,
            endpoint=exchange.endpoint,
            status=exchange.status,
            outcome=exchange.outcome,
            **exchange.facts,
            total_s=round(time.monotonic() - exchange.started_at, 6),
        )

    async def _route(self, exchange: HttpExchange) -> None:
        path, method = exchange.scope["path"], exchange.scope["method"]
        if path not in OPEN_PATHS:
            exchange.cors = self._origins.admit(exchange.scope)
            if exchange.cors and (answer := preflight(exchange.scope, b"GET, HEAD, POST, OPTIONS")):
                await exchange.respond(200, b"", *answer)  # browsers send no key with this question
                return
            if self._api_keys is not None:
                exchange.key_name = asgi.check_api_key(exchange.scope, self._api_keys)
        route = self._routes.get(path)
        if route is None and path.startswith("/v1/models/"):
            route = "models", "GET", self._status.model
        if route is None:
            raise HttpError(404, f"there is no {shown(path)} here", code="not_found")
        exchange.endpoint, allowed, handler = route
        allow = (b"allow", b"GET, HEAD, OPTIONS" if allowed == "GET" else b"POST, OPTIONS")
        if method == "OPTIONS":
            await exchange.respond(200, b"", allow)
        elif method != allowed and (method, allowed) != ("HEAD", "GET"):
            raise HttpError(405, f"use {allowed} here", code="method_not_allowed", headers=(allow,))
        else:
            await handler(exchange)

    # Completions.

    async def _completions(self, exchange: HttpExchange) -> None:
        await self._complete(exchange, self._parser.completion)

    async def _chat_completions(self, exchange: HttpExchange) -> None:
        await self._complete(exchange, self._parser.chat)

    async def _complete(
        self, exchange: HttpExchange, read: Callable[..., CompletionRequest]
    ) -> None:
        if self.draining:
            raise WireError(ErrorCode.DRAINING, "the router is shutting down; try another one")
        # Known even while no worker is here: a prompt that is too long for the model is answered
        # with that, and not with a 503, after which it would be sent again.
        max_model_len = self._fleet.last_max_model_len
        if max_model_len is None:
            raise WireError(ErrorCode.NO_WORKER, "no worker is here; try again shortly")
        seed = secrets.randbits(63)
        asked = await self._read(
            exchange, partial(read, asker=exchange.asker, seed=seed, max_model_len=max_model_len)
        )
        writer = self._writer(exchange)
        completion = Completion(self._dispatcher, asked, writer)
        completion.submit()
        watch = asyncio.create_task(wait_for_disconnect(exchange.receive, writer))
        self._writers.add(writer)
        try:
            await self._deliver(exchange, completion, writer)
        except asyncio.CancelledError:
            if not writer.is_cut:
                raise
            await self._drop_slow_client(exchange, watch)
            raise Disconnected from None
        finally:
            self._writers.discard(writer)
            watch.cancel()
            completion.cancel()
            exchange.is_streaming = writer.is_started
            exchange.outcome, exchange.facts = completion.outcome, completion.facts

    async def _deliver(
        self, exchange: HttpExchange, completion: Completion, writer: ResponseWriter
    ) -> None:
        asked = completion.asked
        head = {
            "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{exchange.request_id}",
            "created": int(time.time()),
            "model": self._model_name,
        }
        if asked.is_streamed:
            await writer.stream(completion, ChunkWriter(completion, head))
            return
        pieces = await writer.collect(completion)
        render = partial(whole_body, completion, pieces, head)
        await exchange.respond(200, await self._threads.run(size_of_scores(pieces), render))

    def _writer(self, exchange: HttpExchange) -> ResponseWriter:
        task = asyncio.current_task()
        assert task is not None
        return ResponseWriter(
            exchange.send,
            headers=exchange.headers,
            clock=time.monotonic,
            cut_off=task.cancel,
            on_tokens=self.metrics.on_tokens,
        )

    async def _drop_slow_client(self, exchange: HttpExchange, watch: asyncio.Task[None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        self.metrics.on_slow_client()
        if abort(exchange.send):
            await watch  # The server has to see its connection gone before this returns.

    def _start_ticking(self) -> None:
        if self._tick_due is None:
            loop = asyncio.get_running_loop()
            self._tick_due = loop.time() + TICK_S
            loop.call_at(self._tick_due, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._tick_due is not None
        self.metrics.on_lag(max(loop.time() - self._tick_due, 0.0))
        for writer in tuple(self._writers):
            writer.tick()
        self._tick_due = loop.time() + TICK_S
        loop.call_at(self._tick_due, self._tick, loop)

    async def _tokenize(self, exchange: HttpExchange) -> None:
        limit = self._fleet.last_max_model_len
        read = partial(self._parser.tokenize, max_model_len=limit)
        await exchange.respond(200, await self._read(exchange, read))

    async def _detokenize(self, exchange: HttpExchange) -> None:
        await exchange.respond(200, await self._read(exchange, self._parser.detokenize))

    async def _read(self, exchange: HttpExchange, read: Callable[[bytes], T]) -> T:
        """Return what `read` makes of the body: a long one in a thread."""
        async with self._bodies.of(exchange) as raw:
            return await self._threads.run(len(raw), partial(read, raw))
