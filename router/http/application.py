"""The ASGI application: routes, conversion of errors to responses, one log line per request.

A completion takes four steps: `router.http.limits` reads the body, the endpoint (`router.api.text`,
`router.api.chat`) converts it to core requests, `router.api.completions.completion` submits them,
and `router.http.writer` sends the results, while a task watches for the client to leave.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, TypeVar

import structlog

from router import metrics
from router.api import chat, text
from router.api.completions.completion import Completion, CompletionRequest
from router.api.completions.logprobs import size_of_scores
from router.api.completions.response import Head
from router.api.errors import HttpError, http_error
from router.api.messages.body import count_tokens
from router.api.messages.body import read as read_message
from router.api.messages.errors import check_version, message_error
from router.api.model import RequestContext, ServedModel
from router.api.responses import endpoint as responses
from router.api.responses.store import KeptResponse, KeptResponses
from router.api.tokenize import detokenize, tokenize
from router.core.dispatcher import Dispatcher
from router.core.fleet import Fleet
from router.http import asgi
from router.http.asgi import Disconnected, HttpExchange, Receive, Scope, Send
from router.http.limits import Admission, Bodies, Threads
from router.http.origin import Origins, preflight
from router.http.responses import ResponseHandlers
from router.http.routes import Handler, Route, Routes
from router.http.server import cut, find_push
from router.http.status import Status
from router.http.structures import Structures
from router.http.writer import ResponseWriter
from router.processes.siblings import Siblings
from wire.aio.fair_writes import FairWrites
from wire.errors import ErrorCode, WireError
from wire.process.api_keys import ApiKeys
from wire.process.frame_counters import Traffic

log = structlog.get_logger("router")

# Between two checks for silent streams, which get a comment.
TICK_S: Final = 1.0
# Logged, never sent, if the client left before the response (nginx's number).
CLIENT_CLOSED: Final = 499
# Methods that an allowed web page may use.
METHODS: Final = b"GET, HEAD, POST, DELETE, OPTIONS"
# Parses a body.
Read = Callable[..., CompletionRequest]
# Finds the stored response that a body continues.
PreviousOf = Callable[[HttpExchange, bytes], Awaitable[KeptResponse | None]]
T = TypeVar("T")


class Application:
    """The application; `await application(scope, receive, send)`.

    `draining` makes it unready and refuse new completions; open ones go on.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        dispatcher: Dispatcher,
        fleet: Fleet,
        api_keys: ApiKeys | None = None,
        planes: Mapping[str, Traffic] | None = None,
        bodies: Bodies | None = None,
        origins: Origins | None = None,
        kept: KeptResponses | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        self.draining = False
        self._api_keys = api_keys
        self._bodies = bodies or Bodies()
        self._origins = origins or Origins()
        self._admission = Admission()
        self._threads = Threads()
        self._structures = Structures(self._threads.ordinary)
        self._kept = KeptResponses() if kept is None else kept
        self.metrics = metrics.Metrics(fleet, dispatcher, planes)
        self.metrics.tasks.set_function(lambda: len(asyncio.all_tasks()))
        self._model = model
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._writers: set[ResponseWriter] = set()
        self._turns = FairWrites()
        self._tick_due: float | None = None
        dispatcher.observers.append(self.metrics)
        status = Status(
            model=self._model,
            fleet=fleet,
            dispatcher=dispatcher,
            statistics=self.metrics,
            is_draining=lambda: self.draining,
            siblings=siblings,
        )
        if siblings is not None:
            siblings.serve(status.state, self.metrics.families, self._kept)
        kept_ones = ResponseHandlers(self._kept, self._threads, siblings)
        self.routes = Routes(self._table(status, kept_ones))

    def _table(self, status: Status, kept: ResponseHandlers) -> list[Route]:
        def asks(read: Read) -> dict[str, Handler]:
            return {"POST": partial(self._complete, read)}

        respond = partial(
            self._complete, partial(responses.read, self._kept), previous_of=kept.previous
        )

        def messages(path: str, name: str, handler: Handler) -> Route:
            return Route(path, name, {"POST": partial(_in_version, handler)}, message_error)

        probe = partial(Route, is_open=True)
        return [
            Route("/v1/completions", "completions", asks(text.read)),
            Route("/v1/chat/completions", "chat_completions", asks(chat.read)),
            Route("/v1/responses", "responses", {"POST": respond}),
            # The first route that fits is used.
            Route("/v1/responses/{response}/input_items", "responses", {"GET": kept.input_items}),
            Route("/v1/responses/{response}/cancel", "responses", {"POST": kept.cancel}),
            Route(
                "/v1/responses/{response}", "responses", {"GET": kept.show, "DELETE": kept.delete}
            ),
            messages("/v1/messages", "messages", partial(self._complete, read_message)),
            messages("/v1/messages/count_tokens", "count_tokens", self._count_tokens),
            Route("/tokenize", "tokenize", {"POST": self._tokenize}),
            Route("/detokenize", "detokenize", {"POST": self._detokenize}),
            Route("/v1/models", "models", {"GET": status.models}),
            Route("/v1/models/{model}", "models", {"GET": status.model}),
            Route("/v1/cluster", "cluster", {"GET": status.cluster}),
            Route("/version", "version", {"GET": status.version}),
            Route("/metrics", "metrics", {"GET": status.metrics}),
            Route("/load", "load", {"GET": status.load}),
            # Open, since browsers send no key when a page is opened.
            Route("/openapi.json", "openapi", {"GET": status.openapi}, is_open=True),
            Route("/docs", "docs", {"GET": status.docs}, is_open=True),
            probe("/livez", "livez", {"GET": status.livez}),
            probe("/readyz", "readyz", {"GET": status.readyz}),
            probe("/health", "health", {"GET": status.readyz}),
            probe("/ping", "ping", {"GET": status.readyz, "POST": status.readyz}),
        ]

    @property
    def has_text(self) -> bool:
        """Whether the model has a tokenizer, so that prompts may be text."""
        return self._model.tokenizer.has_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._start_ticking()
        request_id = asgi.request_id(scope, secrets.token_hex(16))
        await self._serve(HttpExchange(scope, receive, send, request_id, time.monotonic()))

    async def _serve(self, exchange: HttpExchange) -> None:
        try:
            await self._route(exchange)
        except Disconnected:
            exchange.status, exchange.outcome = CLIENT_CLOSED, "cancelled"
        except HttpError as error:
            await self._refuse(exchange, error)
        except WireError as error:
            await self._refuse(exchange, http_error(error))
        except Exception:
            log.exception("bug", request_id=exchange.request_id, endpoint=exchange.endpoint)
            internal = WireError(ErrorCode.INTERNAL, "")
            await self._refuse(exchange, http_error(internal))
        finally:
            self._note(exchange)

    async def _refuse(self, exchange: HttpExchange, error: HttpError) -> None:
        exchange.status, exchange.outcome = error.status, error.code or "error"
        if exchange.is_streaming:
            body = exchange.failure(error)
            await exchange.send({"type": "http.response.body", "body": body})
        else:
            body = exchange.error_body(error, exchange.request_id)
            await exchange.respond(error.status, body, *error.headers)

    def _note(self, exchange: HttpExchange) -> None:
        self.metrics.on_response(exchange.endpoint, exchange.outcome)
        # Probes come every second, and are 503 while workers start.
        is_work = exchange.scope["method"] == "POST" or exchange.status >= 400
        is_work = is_work and not exchange.is_open
        (log.info if is_work else log.debug)(
            "request",
            face="http",
            client=exchange.client,
            request_id=exchange.request_id,
            endpoint=exchange.endpoint,
            status=exchange.status,
            outcome=exchange.outcome,
            **exchange.facts,
            **asgi.trace(exchange.scope),
            total_s=round(time.monotonic() - exchange.started_at, 6),
        )

    async def _route(self, exchange: HttpExchange) -> None:
        path, method = exchange.scope["path"], exchange.scope["method"]
        route, exchange.named = self.routes.find(path) or (None, "")
        if route is not None:
            exchange.error_body, exchange.is_open = route.error_body, route.is_open
        if not exchange.is_open:
            exchange.cors = self._origins.admit(exchange.scope)
            if exchange.cors and (answer := preflight(exchange.scope, METHODS)):
                await exchange.respond(200, b"", *answer)  # browsers send no key with a preflight
                return
            if self._api_keys is not None:
                exchange.key_name = asgi.check_api_key(exchange.scope, self._api_keys)
        if route is None:
            raise self.routes.missing(path)
        exchange.endpoint = route.name
        if method == "OPTIONS":
            await exchange.respond(200, b"", (b"allow", route.allow))
        else:
            await route.handler(method)(exchange)

    # Completions.

    async def _complete(
        self, read: Read, exchange: HttpExchange, *, previous_of: PreviousOf | None = None
    ) -> None:
        if self.draining:
            raise WireError(ErrorCode.DRAINING, "the router is shutting down; try another one")
        # Known even after all workers left: a prompt that is too long gets 400, not 503.
        max_model_len = self._fleet.last_max_model_len
        if max_model_len is None:
            raise WireError(ErrorCode.NO_WORKER, "no worker is here; try again shortly")
        context = RequestContext(exchange.asker, secrets.randbits(63), max_model_len)
        understand = lambda raw, **found: read(self._model, raw, context, **found)  # noqa: E731
        asked = await self._read(exchange, understand, previous_of)
        if asked.wanted is not None:
            asked = asked.constrained_to(await self._structures.settle(exchange, asked.wanted))
        writer = self._writer(exchange)
        completion = Completion(self._dispatcher, asked, writer)
        completion.submit()
        watch = asyncio.create_task(_watch(exchange, writer))
        self._writers.add(writer)
        try:
            await self._deliver(exchange, completion, writer)
        finally:
            self._writers.discard(writer)
            watch.cancel()
            completion.cancel()
            completion.drop_callbacks()
            exchange.is_streaming = writer.is_started
            exchange.outcome, exchange.facts = completion.outcome, completion.facts

    async def _deliver(
        self, exchange: HttpExchange, completion: Completion, writer: ResponseWriter
    ) -> None:
        head = Head(exchange.request_id, int(time.time()), self._model.name)
        answer = completion.request.answer(completion, head)
        exchange.failure = answer.failure
        if completion.request.is_streamed:
            await writer.stream(completion, answer)
            return
        pieces = await writer.collect(completion)
        size = size_of_scores(pieces) + sum([len(piece.text) for piece in pieces])
        render = partial(answer.whole, pieces)
        await exchange.respond(200, await self._threads.run(exchange, size, render))

    def _writer(self, exchange: HttpExchange) -> ResponseWriter:
        return ResponseWriter(
            exchange.send,
            self._turns,
            find_push=find_push,
            headers=exchange.headers,
            clock=time.monotonic,
            cut_off=partial(cut, exchange.send),
            on_tokens=self.metrics.on_tokens,
        )

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
        read = partial(tokenize, self._model, max_model_len=limit)
        await exchange.respond(200, await self._read(exchange, read))

    async def _detokenize(self, exchange: HttpExchange) -> None:
        await exchange.respond(200, await self._read(exchange, partial(detokenize, self._model)))

    async def _count_tokens(self, exchange: HttpExchange) -> None:
        await exchange.respond(200, await self._read(exchange, partial(count_tokens, self._model)))

    async def _read(
        self, exchange: HttpExchange, read: Callable[..., T], previous_of: PreviousOf | None = None
    ) -> T:
        """Read and parse the body, a large one in a thread."""
        raw = await self._bodies.read(exchange)
        try:
            size = len(raw)
            if previous_of is not None:
                previous = await previous_of(exchange, raw)
                size += previous.size if previous else 0
                read = partial(read, previous=previous)
            await self._admission.wait(exchange)
            return await self._threads.run(exchange, size, partial(read, raw))
        finally:
            self._bodies.let_go(exchange, raw)


async def _watch(exchange: HttpExchange, writer: ResponseWriter) -> None:
    await exchange.until_disconnected()
    writer.disconnect()


async def _in_version(handler: Handler, exchange: HttpExchange) -> None:
    check_version(asgi.find_header(exchange.scope, b"anthropic-version"))
    await handler(exchange)
