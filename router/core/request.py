"""Requests to the core, and the sinks that get their results; types only.

HTTP (`router.http`) and raw TCP (`router.tcp`) give a `Request` and a `Sink` to
`router.core.dispatcher.Dispatcher.submit`.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from wire.errors import ErrorCode, WireError
from wire.options import Options
from wire.payloads import Logprobs, PrefillResult, Usage


class Request(Struct, frozen=True):
    """One prompt that gets one answer.

    `max_new_tokens` counts the tokens after the first; None until DECODE_REQUEST (raw TCP).
    `client` is for fair scheduling and the log: the digest of an API key, or the address without
    its port.
    """

    token_ids: tuple[int, ...]
    options: Options
    max_new_tokens: int | None = None
    client: str = ""


class RequestEnd(Struct, frozen=True, kw_only=True):
    """The end of an accepted request, with its counts and times in seconds (None if not reached).

    `outcome` is the finish reason (``stop``, ``length``) or the label of `code`.  `queue_s` is from
    `submit` to the placement, `ttft_s` from `submit` to the first token, `decode_s` from there to
    the end, `total_s` all of it.  `num_local` of the attempts had one worker for prompt and answer.
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
    num_local: int = 0


class Sink(Protocol):
    """Gets the results of a request: `on_prefill`, `on_token` for each further token, its end.

    Every request ends with one call of `on_end`, and then one of `on_done` or `on_error`, unless
    its submitter stopped or cancelled it.  No method may block or raise.
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
        """The request ended, well or not: for metrics and the log."""
