"""Server-sent events: the frames of a streamed response.

Events never carry ``id:`` (after one, a client may take a later comment for an empty event).
"""

from __future__ import annotations

from typing import Final

from router.api.errors import Header

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
HEADERS: Final[tuple[Header, ...]] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def event(body: bytes, kind: str | None = None) -> bytes:
    """Frame one JSON document; `kind` names the event where the API has names for them."""
    name = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return name + b"data: " + body + b"\n\n"
