"""The types of response bodies, for the OpenAPI document.

Responses are built elsewhere without these types; tests validate them against the types.  A
response may have further fields, and fields with a default may be missing.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, defstruct

from router.api.completions.usage import UsageBody


class ErrorDetail(Struct):
    """`code` is a machine-readable word, and `param` the name of the invalid field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """The error of a failed request."""

    error: ErrorDetail


class MessageErrorDetail(Struct):
    type: str
    message: str


class MessageError(Struct):
    """The error of a failed request, in Anthropic's format."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str


# Text completions.


class TextLogprobs(Struct):
    """Lists with an entry for each token; a prompt's first token has no log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Ended(Struct, kw_only=True):
    """`stop_reason` is the stop string or token id that ended the choice, if any."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class TextChoice(Ended, kw_only=True):
    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None


class TextCompletion(Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody


# Chat completions.


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ScoredLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    content: list[ScoredLogprob] | None
    refusal: None


class CalledFunction(Struct):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Ended, kw_only=True):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None


# Responses.


class ResponseItem(Struct):
    """A message, reasoning, a function call or the output of one; `type` tells which."""

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]
    status: Literal["completed", "incomplete", "in_progress"]
    role: str | None = None
    content: list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None


class ResponseUsage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class Response(Struct):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    incomplete_details: dict[str, str] | None
    output: list[ResponseItem]
    usage: ResponseUsage
    error: None


class ResponseItems(Struct):
    object: Literal["list"]
    data: list[ResponseItem]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


# Messages.


class TextBlock(Struct, tag="text"):
    text: str


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Struct):
    """`input_tokens` does not include tokens read from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class Message(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage


# Other responses.


class Tokens(Struct):
    tokens: list[int]
    count: int
    max_model_len: int | None


class Model(Struct):
    """`max_model_len` is null while no workers are connected.  Token ids are below `vocab_size`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    vocab_size: int | None


class Models(Struct):
    object: Literal["list"]
    data: list[Model]


class Counted(Struct):
    """Requests of the router and the fingerprint of its model; `processes` has the requests
    of each process with `--processes`."""

    running: int
    waiting: int
    fingerprint: str
    processes: list[dict[str, int]] | None = None


class Cluster(Struct):
    """The state of every worker, the number of requests in this router, and refused workers."""

    workers: list[dict[str, Any]]
    router: Counted
    refused: list[dict[str, Any]]


class Draining(Struct):
    """A worker that was asked to drain; `placed` are the requests that it had then."""

    worker: str
    epoch: int
    placed: int


class Readiness(Struct):
    """`reasons` lists why completions cannot be served now."""

    status: Literal["ready", "unready"]
    reasons: list[str]


InputTokens = defstruct("InputTokens", [("input_tokens", int)])
Text = defstruct("Text", [("prompt", str)])
Release = defstruct("Release", [("version", str)])
Load = defstruct("Load", [("server_load", int)])
Restarted = defstruct("Restarted", [("status", Literal["restarted"])])
Alive = defstruct("Alive", [("status", Literal["alive"])])
