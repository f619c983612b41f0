"""A client's request inside the router, and the sink its events go to.

Both faces (HTTP in `router.http.application`, raw TCP in `router.tcp`) make a `Request`, give it to
`router.core.dispatcher.Dispatcher.submit` with a `Sink`, and hear of it through that sink only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wire.errors import ErrorCode, WireError
from wire.options import Options
from wire.payloads import Logprobs, PrefillResult, Usage


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued once.

    `max_new_tokens` counts the tokens after the first; None means that a DECODE_REQUEST will say
    (raw TCP).  `client` names who asks, for fairness and logs: an API key by its digest, or without
    keys an address, whatever its port.
    """

    token_ids: tuple[int, ...]
    options: Options
    max_new_tokens: int | None = None
    client: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """What one accepted request came to; times in seconds, None when it did not get that far.

    `outcome` is the finish reason (``stop``, ``length``) or the label of `code`.  `queue_s` runs to
    the placement, `ttft_s` from submission to the first token, `decode_s` from there to the end.
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
    num_attempts: int = 1


class Sink(Protocol):
    """Where the events of one request go, in this order: prefill, token*, then done or error.

    Exactly one of `on_done` and `on_error` is called, once, and nothing after it, unless the owner
    cancelled the request: then it is neither.  `on_end` comes before either and in any case, for
    the books.  Called on the event loop; must not block and must not raise.
    """

    def on_prefill(self, result: PrefillResult, kv_bytes: int) -> None:
        """The prompt is read; `result` holds the first token."""

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        """One more token."""

    def on_done(self, usage: Usage) -> None:
        """The request ended well."""

    def on_error(self, error: WireError) -> None:
        """The request ended badly."""

    def on_end(self, end: RequestEnd) -> None:
        """The request ended, in whatever way."""
