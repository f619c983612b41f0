"""A request to the core, and the sink that receives its tokens; types only.

HTTP (`router.http`) and raw TCP (`router.tcp`) make a `Request`, give it to `Dispatcher.submit`
(`router.core.dispatcher`) together with a `Sink`, and hear of it through that sink only.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from wire.errors import ErrorCode, WireError
from wire.options import Options
from wire.payloads import Logprobs, PrefillResult, Usage


class Request(Struct, frozen=True):
    """One prompt that gets one answer.

    `max_new_tokens` counts the tokens after the first; None means that DECODE_REQUEST will say how
    many (raw TCP).  `client` names who asks, for taking turns and for the log: the digest of an API
    key, or without keys the address without its port.
    """

    token_ids: tuple[int, ...]
    options: Options
    max_new_tokens: int | None = None
    client: str = ""


class RequestEnd(Struct, frozen=True, kw_only=True):
    """How an accepted request ended and what it took; times in seconds, None if it got not so far.

    `outcome` is the finish reason (``stop``, ``length``) or the label of `code`.  `queue_s` is from
    `submit` to the placement, `ttft_s` from `submit` to the first token, `decode_s` from there to
    the end, `total_s` all of it.
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


class Sink(Protocol):
    """Hears what comes of a request: `on_prefill`, `on_token` for each further token, its end.

    Every request ends with one call of `on_end`.  Right after it follows `on_done` or `on_error`,
    unless whoever submitted the request stopped or cancelled it; then nothing.  All are called on
    the event loop, and must neither block nor raise.
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
        """The request ended, in whatever way: for metrics and the log."""
