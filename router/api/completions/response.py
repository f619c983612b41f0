"""Types of a response: its encoder, and the fields that every response has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from router.api.completions.deltas import Delta
from router.api.errors import HttpError


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
