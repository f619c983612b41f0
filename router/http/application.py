"""The ASGI application: routes requests, converts errors to responses, logs a line per request.

`Application._table` lists all endpoints.  A completion takes four steps: `router.http.limits` reads
the body, the endpoint (`router.api.text`, `router.api.chat`) converts it to core requests,
`router.api.completions.completion` submits them, and `router.http.writer` sends the results, while
a task waits for the client to disconnect.
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
from router.http import asgi
from router.http.administration import Administration
from router.http.asgi import Disconnected, HttpExchange, Receive, Scope, Send
from router.http.events import ClusterEvents
from router.http.limits import Admission, Bodies, Threads
from router.http.origin import Origins, preflight
from router.http.requests import RequestHandlers
from router.http.responses import ResponseHandlers
from router.http.routes import Handler, Route, Routes
from router.http.status import Status
from router.http.structures import Structures
from router.http.transport import cut, find_push
from router.http.verification import Verifications
from router.http.writer import ResponseWriter
from router.log import new_traceparent
from router.processes.channel import Ask, AskActivity, Find, Question
from router.processes.siblings import Siblings
from wire.aio.fair_writes import FairWrites
from wire.errors import ErrorCode, WireError
from wire.process.api_keys import ApiKeys, name_of
from wire.process.frame_counters import Traffic

log = structlog.get_logger("router")

# The interval between two checks for idle streams, to which a comment is sent.
TICK_S: Final = 1.0
# The status logged if the client disconnected before the response (as in nginx).  Never sent.
CLIENT_CLOSED: Final = 499
# The methods that allowed web pages may use.
METHODS: Final = b"GET, HEAD, POST, DELETE, OPTIONS"
# Parses a request body.
Read = Callable[..., CompletionRequest]
# Returns the stored response that a request body continues (`previous_response_id`).
PreviousOf = Callable[[HttpExchange, bytes], Awaitable[KeptResponse | None]]
T = TypeVar("T")


class Application:
    """The ASGI application of one router process: `await application(scope, receive, send)`.

    While `draining` is True, it reports that it is not ready and refuses new completions, and open
    ones continue.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        dispatcher: Dispatcher,
        api_keys: ApiKeys | None = None,
        planes: Mapping[str, Traffic] | None = None,
        bodies: Bodies | None = None,
        origins: Origins | None = None,
        kept: KeptResponses | None = None,
        siblings: Siblings | None = None,
        administration: Administration,
        is_tracing: bool = False,
        vllm_metrics: bool = True,
    ) -> None:
        """`is_tracing`: begin a trace for each completion whose client has not begun one."""
        self.draining = False
        self._is_tracing = is_tracing
        self._api_keys = api_keys
        self._bodies = bodies or Bodies()
        self._origins = origins or Origins()
        self._admission = Admission()
        self._threads = Threads()
        self._structures = Structures(self._threads.ordinary)
        self._kept = KeptResponses() if kept is None else kept
        vllm_model = model.name if vllm_metrics else ""
        self.metrics = metrics.Metrics(dispatcher, planes, vllm_model=vllm_model)
        self.metrics.tasks.set_function(lambda: len(asyncio.all_tasks()))
        self._model = model
        self._dispatcher = dispatcher
        self._writers: set[ResponseWriter] = set()
        self._fair_writes = FairWrites()
        self._tick_due: float | None = None
        dispatcher.observers.append(self.metrics)
        status = Status(model, dispatcher, self.metrics, lambda: self.draining, siblings)
        requests = RequestHandlers(dispatcher.history, self._threads, siblings)
        watched = ClusterEvents(
            dispatcher, status.state, lambda: self.draining, model.abilities, siblings
        )
        self.verifications = Verifications(dispatcher, administration, siblings)
        self._status, self._requests, self._watched = status, requests, watched
        if siblings is not None:
            siblings.answer = self.answer
        stored = ResponseHandlers(self._kept, self._threads, siblings)
        table = self._table(status, stored, requests, watched)
        self.routes = Routes([*_administrative(administration, self.verifications), *table])

    def _table(
        self,
        status: Status,
        stored: ResponseHandlers,
        requests: RequestHandlers,
        watched: ClusterEvents,
    ) -> list[Route]:
        def completes(read: Read) -> dict[str, Handler]:
            return {"POST": partial(self._complete, read)}

        respond = partial(
            self._complete, partial(responses.read, self._kept), previous_of=stored.previous
        )

        def messages(path: str, name: str, handler: Handler) -> Route:
            return Route(path, name, {"POST": partial(_in_version, handler)}, message_error)

        probe = partial(Route, is_open=True)
        return [
            Route("/v1/completions", "completions", completes(text.read)),
            Route("/v1/chat/completions", "chat_completions", completes(chat.read)),
            Route("/v1/responses", "responses", {"POST": respond}),
            # The first match is used, so the longer paths come first.
            Route("/v1/responses/{response}/input_items", "responses", {"GET": stored.input_items}),
            Route("/v1/responses/{response}/cancel", "responses", {"POST": stored.cancel}),
            Route(
                "/v1/responses/{response}",
                "responses",
                {"GET": stored.show, "DELETE": stored.delete},
            ),
            messages("/v1/messages", "messages", partial(self._complete, read_message)),
            messages("/v1/messages/count_tokens", "count_tokens", self._count_tokens),
            Route("/tokenize", "tokenize", {"POST": self._tokenize}),
            Route("/detokenize", "detokenize", {"POST": self._detokenize}),
            Route("/v1/models", "models", {"GET": status.models}),
            Route("/v1/models/{model}", "models", {"GET": status.model}),
            Route("/v1/requests/{request}", "requests", {"GET": requests.show}),
            Route("/v1/cluster", "cluster", {"GET": status.cluster}),
            Route("/v1/cluster/events", "cluster_events", {"GET": watched.events}),
            Route("/version", "version", {"GET": status.version}),
            Route("/metrics", "metrics", {"GET": status.metrics}),
            Route("/load", "load", {"GET": status.load}),
            # These need no API key, since browsers send none when they open a page.
            Route("/", "page", {"GET": watched.page}, is_open=True),
            Route("/openapi.json", "openapi", {"GET": status.openapi}, is_open=True),
            Route("/docs", "docs", {"GET": status.docs}, is_open=True),
            probe("/livez", "livez", {"GET": status.livez}),
            probe("/readyz", "readyz", {"GET": status.readyz}),
            probe("/health", "health", {"GET": status.readyz}),
            probe("/ping", "ping", {"GET": status.readyz, "POST": status.readyz}),
        ]

    async def answer(self, question: Question) -> object:
        """Compute the reply to a request of another process of the router."""
        match question:
            case Ask.STATE:
                return self._status.state()
            case Ask.METRICS:
                return self.metrics.families()
            case AskActivity(since):
                return self._watched.look(since)
            case Find("report", client, name):
                return await self._requests.report(client, name)
            case Find("replay", _, name):
                return await self.verifications.find(name)
            case Find("response", str(client), name):
                return self._kept.get(client, name)
            case Find("delete", str(client), name):
                return self._kept.pop(client, name)
        return None

    @property
    def has_text(self) -> bool:
        """Whether the model has a tokenizer, so that prompts can be text."""
        return self._model.tokenizer.has_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._start_ticking()
        request_id = asgi.request_id(scope, secrets.token_hex(16))
        exchange = HttpExchange(scope, receive, send, request_id, time.monotonic())
        exchange.trace = asgi.trace(scope)
        await self._serve(exchange)

    async def _serve(self, exchange: HttpExchange) -> None:
        """Run a request, converting exceptions to an error response."""
        try:
            await self._route(exchange)
        except Disconnected:
            exchange.status, exchange.outcome = CLIENT_CLOSED, "cancelled"
        except HttpError as error:
            await self._refuse(exchange, error)
        except WireError as error:
            await self._refuse(exchange, http_error(error))
        except Exception:
            log.exception("bug", endpoint=exchange.endpoint, **exchange.tags)
            internal = WireError(ErrorCode.INTERNAL, "")
            await self._refuse(exchange, http_error(internal))
        finally:
            self._log_request(exchange)

    async def _refuse(self, exchange: HttpExchange, error: HttpError) -> None:
        exchange.status, exchange.outcome = error.status, error.code or "error"
        if exchange.is_streaming:
            body = exchange.failure(error)
            await exchange.send({"type": "http.response.body", "body": body})
        else:
            body = exchange.error_body(error, exchange.request_id)
            await exchange.respond(error.status, body, *error.headers)

    def _log_request(self, exchange: HttpExchange) -> None:
        self.metrics.on_response(exchange.endpoint, exchange.outcome)
        # Probes come every second, and get 503 while workers start.
        is_work = exchange.scope["method"] == "POST" or exchange.status >= 400
        is_work = is_work and not exchange.is_open
        (log.info if is_work else log.debug)(
            "request",
            face="http",
            client=exchange.client,
            endpoint=exchange.endpoint,
            status=exchange.status,
            outcome=exchange.outcome,
            **exchange.facts,
            **exchange.tags,
            total_s=round(time.monotonic() - exchange.started_at, 6),
        )

    async def _route(self, exchange: HttpExchange) -> None:
        """Check origin and API key, and call the handler for the path and method."""
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
                self._identify(exchange, self._api_keys)
        if route is None:
            raise self.routes.missing(path)
        exchange.endpoint = route.name
        if method == "OPTIONS":
            await exchange.respond(200, b"", (b"allow", route.allow))
        else:
            await route.handler(method)(exchange)

    def _identify(self, exchange: HttpExchange, api_keys: ApiKeys) -> None:
        key_digest = asgi.check_api_key(exchange.scope, api_keys)
        exchange.key_name = name_of(key_digest)
        exchange.cache_salt = partial(api_keys.cache_salt, key_digest)
        exchange.is_allowed = partial(api_keys.allow, key_digest)

    # Completions.

    async def _complete(
        self, read: Read, exchange: HttpExchange, *, previous_of: PreviousOf | None = None
    ) -> None:
        """Serve a completion of any endpoint, whose `read` parses the body."""
        if self.draining:
            raise WireError(ErrorCode.DRAINING, "the router is shutting down; try another one")
        # It is known even after all workers have left: a prompt that is too long gets 400, not 503.
        max_model_len = self._dispatcher.fleet.last_max_model_len
        if max_model_len is None:
            raise WireError(ErrorCode.NO_WORKER, "no worker is here; try again shortly")
        begins_trace = self._is_tracing and not exchange.trace
        if begins_trace:
            exchange.trace = {"traceparent": new_traceparent()}
        context = RequestContext(
            exchange.client_id,
            secrets.randbits(63),
            max_model_len,
            exchange.cache_salt,
            exchange.request_id,
            exchange.traceparent,
            begins_trace,
        )
        parse = lambda raw, **found: read(self._model, raw, context, **found)  # noqa: E731
        request = await self._read(exchange, parse, previous_of)
        if request.wanted is not None:
            structure = await self._structures.validate(exchange, request.wanted)
            request = request.constrained_to(structure)
        writer = self._writer(exchange)
        completion = Completion(self._dispatcher, request, writer)
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
        """Send the results of a submitted completion, streamed or whole."""
        head = Head(exchange.request_id, int(time.time()), self._model.name)
        answer = completion.request.answer(completion, head)
        exchange.failure = answer.failure
        if completion.request.is_streamed:
            await writer.stream(completion, answer)
            return
        deltas = await writer.collect(completion)
        size = size_of_scores(deltas) + sum([len(delta.text) for delta in deltas])
        render = partial(answer.whole, deltas)
        await exchange.respond(200, await self._threads.run(exchange, size, render))

    def _writer(self, exchange: HttpExchange) -> ResponseWriter:
        return ResponseWriter(
            exchange.send,
            self._fair_writes,
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
        limit = self._dispatcher.fleet.last_max_model_len
        read = partial(tokenize, self._model, max_model_len=limit)
        await exchange.respond(200, await self._read(exchange, read))

    async def _detokenize(self, exchange: HttpExchange) -> None:
        await exchange.respond(200, await self._read(exchange, partial(detokenize, self._model)))

    async def _count_tokens(self, exchange: HttpExchange) -> None:
        await exchange.respond(200, await self._read(exchange, partial(count_tokens, self._model)))

    async def _read(
        self, exchange: HttpExchange, read: Callable[..., T], previous_of: PreviousOf | None = None
    ) -> T:
        """Read and parse the request body; a large one is parsed in a thread."""
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
            self._bodies.release(exchange, raw)


def _administrative(administration: Administration, verifications: Verifications) -> list[Route]:
    handlers = {
        "/v1/requests/{request}/verify": verifications.verify,
        "/v1/workers/{worker}/drain": administration.drain,
        "/v1/workers/{worker}/restart": administration.restart_worker,
        "/v1/router/restart": administration.restart_router,
    }
    return [Route(path, "administration", {"POST": each}) for path, each in handlers.items()]


async def _watch(exchange: HttpExchange, writer: ResponseWriter) -> None:
    await exchange.until_disconnected()
    writer.disconnect()


async def _in_version(handler: Handler, exchange: HttpExchange) -> None:
    check_version(asgi.find_header(exchange.scope, b"anthropic-version"))
    await handler(exchange)
