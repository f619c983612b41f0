"""The types of requests to the core and of the sinks that receive their results.

HTTP (`router.http`) and raw TCP (`router.tcp`) pass a `Request` and a `Sink` to
`router.core.dispatcher.Dispatcher.submit`.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from router.core.history.record import Outline, Record
from wire.errors import ErrorCode, WireError
from wire.options import Options
from wire.payloads import Logprobs, PrefillResult, Usage


class Request(Struct, frozen=True):
    """One prompt, for which one sequence of tokens is generated.

    `max_new_tokens` is the number of tokens after the first, or None for a raw TCP client, which
    sets it with DECODE_REQUEST.  `client` identifies the client for fair scheduling and the log:
    the name of its API key, or its address without the port.  `name` is the request's id for the
    client; `outline` says which part of the prompt a token is in, None if it has only one part.
    `begins_trace` means that the router made the `traceparent` of the options.  `excluded` are the
    workers, by identity, that must not serve a replay (`router.core.replay`); None if it is none.
    A replay is placed at once or refused, it is not retried, and its tokens are not remembered.
    """

    token_ids: tuple[int, ...]
    options: Options
    max_new_tokens: int | None = None
    client: str = ""
    name: str = ""
    outline: Outline | None = None
    begins_trace: bool = False
    excluded: frozenset[bytes] | None = None

    @property
    def tags(self) -> dict[str, str]:
        """Return what names the request in a log line."""
        tags = {"client": self.client, "request_id": self.name}
        trace_id = self.options.trace_id
        return tags if trace_id is None else tags | {"trace_id": trace_id}


class RequestEnd(Struct, frozen=True, kw_only=True):
    """The summary of an accepted request that has ended.

    `outcome` is the finish reason (``stop``, ``length``) or the label of `code`.  `queue_s` is from
    `submit` to the placement, `ttft_s` from `submit` to the first token, `decode_s` from there to
    the end, `total_s` all of it.  `local_reasons` has one item for each attempt that had one worker
    for prompt and answer: "cost" or "no_prefill_worker".  `record` is what
    `router.core.history` keeps of the request, `handle` is what `submit` returned.
    """

    outcome: str
    code: ErrorCode | None
    client: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    kv_bytes: int
    kv_skipped_tokens: int
    kv_seconds: float
    kv_transfer_seconds: float
    queue_s: float | None
    ttft_s: float | None
    decode_s: float | None
    total_s: float
    num_attempts: int
    local_reasons: tuple[str, ...] = ()
    record: Record | None = None
    handle: int = 0


class Sink(Protocol):
    """Receives the results of one request.

    The calls are `on_prefill` with the first token, `on_token` for each further token, one call of
    `on_end`, and last `on_done` or `on_error`, unless the submitter has stopped or cancelled the
    request.  No method may block or raise.
    """

    def on_prefill(self, result: PrefillResult, kv_bytes: int) -> None:
        """Receive the result of prefill, with the first token."""

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        """Receive the next token."""

    def on_done(self, usage: Usage) -> None:
        """Receive the usage of a request that succeeded."""

    def on_error(self, error: WireError) -> None:
        """Receive the error of a request that failed."""

    def on_end(self, end: RequestEnd) -> None:
        """Receive the summary of a request that ended for any reason, for metrics and the log."""
