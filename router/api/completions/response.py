"""Responses: the frames of a stream, and what encodes a response.

Events never carry ``id:`` (after one, a client may take a later comment for an empty event).
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
    """The fields that every response has."""

    request_id: str
    created: int
    model: str


class Answer(Protocol):
    """Makes bytes of a completion, whole or as events; one for each HTTP request."""

    # What is sent in a silence.
    ping: bytes
    # What stands around the text of every further token that shows nothing else; None: it differs.
    usual: tuple[bytes, bytes] | None

    def whole(self, pieces: Sequence[Delta]) -> bytes:
        """Return the body of an answer that is not streamed, of a piece for each choice."""

    def take(self) -> bytes:
        """Return the events of everything that moved since the last call; often just one."""

    def end(self) -> bytes:
        """Return what follows the last of them."""

    def failure(self, error: HttpError) -> bytes:
        """Return the end of a stream that broke."""


def event(body: bytes, kind: str | None = None) -> bytes:
    """Frame one JSON document; `kind` names the event where the API has names for them."""
    name = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return name + b"data: " + body + b"\n\n"
