"""A client's request inside the router, and the sink its events go to.

Both faces (HTTP in `router.gateway`, raw TCP in `router.clients`) make a `Request`, give it to
`router.inflight.InFlight.submit` with a `Sink`, and hear of it through that sink only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wire.errors import WireError
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


class Sink(Protocol):
    """Where the events of one request go, in this order: prefill, token*, then done or error.

    Exactly one of `on_done` and `on_error` is called, once, and nothing after it, unless the owner
    cancelled the request: then nothing more is called at all.  Called on the event loop; must not
    block and must not raise.
    """

    def on_prefill(self, result: PrefillResult, kv_bytes: int) -> None:
        """The prompt is read; `result` holds the first token."""

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        """One more token."""

    def on_done(self, usage: Usage) -> None:
        """The request ended well."""

    def on_error(self, error: WireError) -> None:
        """The request ended badly."""
