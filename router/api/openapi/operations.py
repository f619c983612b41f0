"""The operations of the API: the types of their bodies and responses, and their statuses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

from msgspec import Meta, Struct

from router.api.chat import ChatBody
from router.api.messages.body import MessagesBody, PromptBody
from router.api.openapi import response_types as answers
from router.api.responses.body import ResponseBody
from router.api.responses.store import DEFAULT_ITEMS, MAX_ITEMS
from router.api.text import CompletionBody
from router.api.tokenize import DetokenizeBody, TokenizeBody
from router.core.history.report import RequestReport
from router.core.replay import Verification

STATUSES: Final = {
    400: "The request is wrong: the message names the field and what is allowed there.",
    401: "There is no API key in the request, or one that is not valid.",
    403: "The web page that asks, or the API key, is not allowed to, or the host name is none of "
    "this router.",
    404: "There is nothing of this name here.",
    408: "The request came too slowly, or its deadline has passed.",
    409: "No worker is ready that could serve it.",
    413: "The body is too large, or has too many values.",
    415: "The body is not JSON, or compressed in a way that is not taken.",
    429: "Too many requests wait: ask again after Retry-After seconds.",
    431: "The headers are too large.",
    500: "It failed by a fault of ours.",
    503: "It cannot be served now: ask again after Retry-After seconds.",
}
# Error statuses that every operation may return.
_ALWAYS: Final = {400, 408, 431, 500, 503}


class Operation(NamedTuple):
    """One method of one path.

    `answer` is the type of a JSON response, the media type of a text response, or None if the
    operation always fails.  `refusal` is the type of its errors, and `unready` another type that a
    503 may have.  `example` is a request body that works with the demo model.
    """

    method: str
    path: str
    summary: str
    answer: type[Any] | str | None
    body: type[Any] | None = None
    example: Mapping[str, Any] | None = None
    query: type[Struct] | None = None
    is_streamed: bool = False
    is_open: bool = False  # needs no API key
    refusal: type[Any] = answers.Error
    unready: type[Any] | None = None

    @property
    def refusals(self) -> list[int]:
        of_key = set() if self.is_open else {401, 403}
        of_path = {404} if "{" in self.path else set()
        of_body = {404, 413, 415, 429} if self.body else set()
        of_replay = {409, 429} if self.answer is Verification else set()
        return sorted(_ALWAYS | of_key | of_path | of_body | of_replay)


class ItemsQuery(Struct):
    """The query parameters of a page of items: those after an item, up to a limit, in an order."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS)] = DEFAULT_ITEMS
    order: Literal["asc", "desc"] = "desc"


class VerifyQuery(Struct):
    """`same_worker`: replay on the workers that served the request, instead of others."""

    same_worker: bool = False


_HELLO: Final = [{"role": "user", "content": "Hello"}]
# Anthropic requires a model name; "demo" is the model of a router with default settings.
_TO_DEMO: Final = {"model": "demo", "messages": _HELLO}

_get: Final = partial(Operation, "get")
_post: Final = partial(Operation, "post")

OPERATIONS: Final = (
    _post(
        *("/v1/completions", "Go on with a text.", answers.TextCompletion, CompletionBody),
        example={"prompt": "Once upon a time", "max_tokens": 16},
        is_streamed=True,
    ),
    _post(
        *("/v1/chat/completions", "Say what comes next in a conversation."),
        *(answers.ChatCompletion, ChatBody),
        example={"messages": _HELLO, "max_completion_tokens": 16},
        is_streamed=True,
    ),
    _post(
        *("/v1/responses", "The same in items, which are kept to go on from."),
        *(answers.Response, ResponseBody),
        example={"input": "Hello", "max_output_tokens": 16},
        is_streamed=True,
    ),
    _get("/v1/responses/{response}", "A response that is kept.", answers.Response),
    Operation("delete", "/v1/responses/{response}", "Forget a response.", answers.DeletedResponse),
    _get(
        "/v1/responses/{response}/input_items",
        "The items that a response went on from, page by page.",
        answers.ResponseItems,
        query=ItemsQuery,
    ),
    _post(
        "/v1/responses/{response}/cancel", "Refused: to end an answer, close its connection.", None
    ),
    _post(
        *("/v1/messages", "The same as Anthropic's clients ask for it."),
        *(answers.Message, MessagesBody),
        example=_TO_DEMO | {"max_tokens": 16},
        is_streamed=True,
        refusal=answers.MessageError,
    ),
    _post(
        *("/v1/messages/count_tokens", "How many tokens the prompt of a message would have."),
        *(answers.InputTokens, PromptBody),
        example=_TO_DEMO,
        refusal=answers.MessageError,
    ),
    _post(
        *("/tokenize", "The tokens of a text or a conversation.", answers.Tokens, TokenizeBody),
        example={"prompt": "Hello"},
    ),
    _post(
        *("/detokenize", "The text of tokens.", answers.Text, DetokenizeBody),
        example={"tokens": [1, 2, 3]},
    ),
    _get("/v1/models", "The one model that is served.", answers.Models),
    _get("/v1/models/{model}", "The model of this name.", answers.Model),
    _get(
        "/v1/requests/{request}",
        "How a recent request of this client was served, and why its prompt was not cached.",
        RequestReport,
    ),
    _post(
        "/v1/requests/{request}/verify",
        "Replay a kept request on other workers and compare the tokens. For operators.",
        Verification,
        query=VerifyQuery,
    ),
    _get("/v1/cluster", "Every worker, and what it does.", answers.Cluster),
    _get(
        "/v1/cluster/events",
        "The same and the latest requests as they happen: the stream behind the page.",
        "text/event-stream",
    ),
    _post(
        "/v1/workers/{worker}/drain",
        "Let a worker finish its requests and end. For operators.",
        answers.Draining,
    ),
    _post(
        "/v1/workers/{worker}/restart",
        "The same, and whoever started it starts it again. For operators.",
        answers.Draining,
    ),
    _post(
        "/v1/router/restart",
        "Start a successor of each router process; done when they serve. For operators.",
        answers.Restarted,
    ),
    _get("/load", "How many requests are under way.", answers.Load),
    _get("/metrics", "Figures for Prometheus.", "text/plain"),
    _get("/version", "The release.", answers.Release),
    _get("/livez", "Whether the process is alive.", answers.Alive, is_open=True),
    *(
        Operation(
            *(method, path, "Whether a completion could be served now; if not, 503."),
            answers.Readiness,
            is_open=True,
            unready=answers.Readiness,
        )
        for path in ("/readyz", "/health", "/ping")
        for method in (("get", "post") if path == "/ping" else ("get",))
    ),
    _get("/", "The page: the cluster and a playground.", "text/html", is_open=True),
    _get("/openapi.json", "This description.", dict, is_open=True),
    _get("/docs", "This description as a page.", "text/html", is_open=True),
)
