"""Parts of an answer: content, reasoning and tool calls; and the protocol of their parsers.

A reader parses the text of an answer incrementally.  Parts that it has returned are final, and they
do not depend on how the text is split into chunks: the parts of all chunks, `joined`, equal the
parts of the complete text.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final, Protocol

import msgspec
from pydantic_core import from_json


class Content(msgspec.Struct, frozen=True):
    """Text of the answer itself."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model generates before the answer, to reason about it."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The start of a tool call; calls are numbered from 0.

    If no `CallEnd` follows, the call is unfinished: the answer ended within its arguments, or they
    are not a JSON object.
    """

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """The next part of the JSON text of the arguments of call `index`."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The end of call `index`, whose arguments are a valid JSON object."""

    index: int


Part = Content | Reasoning | CallStart | CallArguments | CallEnd
# The parts that have no text.
TEXTLESS: Final = (CallStart, CallEnd)


class Reader(Protocol):
    """Parses one answer."""

    def feed(self, text: str) -> list[Part]:
        """Parse more text, and return the parts that are certain now."""

    def flush(self) -> list[Part]:
        """Return the remaining parts at the end of the text."""


class PlainReader:
    """A reader for answers that are only content."""

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def flush(self) -> list[Part]:
        return []


def arguments_of(text: str) -> dict[str, Any] | None:
    """Parse the JSON text of a call's arguments; return None if it is not an object.

    The same check applies to calls of the model and to calls that clients send back.
    """
    try:
        # Refuses more than 200 levels of nesting, which templates could not render.
        from_json(text)
        # Refuses numbers that are too large for a float.
        arguments = msgspec.json.decode(text)
    except (ValueError, TypeError):  # TypeError: an unpaired surrogate.
        return None
    return arguments if isinstance(arguments, dict) else None


def joined(parts: list[Part]) -> list[Part]:
    """Merge adjacent parts of one kind."""
    if len(parts) < 2:  # The usual case.
        return parts
    together = list[Part]()
    for _, group in groupby(parts, _kind):
        first, *others = group
        if isinstance(first, TEXTLESS):
            together += [first, *others]
        else:
            texts = [part.text for part in (first, *others) if not isinstance(part, TEXTLESS)]
            together.append(msgspec.structs.replace(first, text="".join(texts)))
    return together


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), 0 if isinstance(part, Content | Reasoning) else part.index
