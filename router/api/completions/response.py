"""Responses: the framing of server-sent events, and the protocol of response renderers.

Events never have an ``id:`` (after one, a client may take a later comment for an empty event).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from router.api.completions.deltas import Delta
from router.api.errors import Header, HttpError

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
HEADERS: Final[tuple[Header, ...]] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Head(NamedTuple):
    request_id: str
    created: int
    model: str


class Answer(Protocol):
    """Renders one completion as a body or as events; there is one for each HTTP request."""

    # A keep-alive event, sent while no tokens arrive.
    ping: bytes
    # The bytes before and after the text of each further event; None if events differ otherwise.
    usual: tuple[bytes, bytes] | None

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """Return the body of a response that is not streamed; `deltas` has a delta per choice."""

    def take(self) -> bytes:
        """Return the events of all tokens since the last call; often just one."""

    def end(self) -> bytes:
        """Return the events that end a complete stream."""

    def failure(self, error: HttpError) -> bytes:
        """Return the events that end a failed stream."""


def event(body: bytes, kind: str | None = None) -> bytes:
    """Frame a JSON document as an event; `kind` is its name in APIs that name events."""
    name = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return name + b"data: " + body + b"\n\n"
