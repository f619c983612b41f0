"""Parts of an answer: content, reasoning and tool calls; and the protocol of their parsers.

A reader turns the text of an answer into parts, piece by piece as the text comes.  What it has
given is never taken back, and depends on the text alone, not on how the text was cut: the parts of
all pieces, `joined`, are the parts of the whole.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final, Protocol

import msgspec
from pydantic_core import from_json


class Content(msgspec.Struct, frozen=True):
    """Text for the client."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Reasoning: text that precedes the answer."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A call of a tool begins; calls are counted from 0.

    Unless a `CallEnd` follows it is unfinished: the answer ended within its arguments, or they are
    not the JSON text of an object.
    """

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A further piece of the JSON text of the arguments of call `index`."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """Call `index` is finished: its arguments are the JSON text of an object."""

    index: int


Part = Content | Reasoning | CallStart | CallArguments | CallEnd
# Parts without text.
TEXTLESS: Final = (CallStart, CallEnd)


class Reader(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are certain after `text` came."""

    def flush(self) -> list[Part]:
        """Return what was held back: the text has ended."""


class PlainReader:
    """Reads answers in which everything is content."""

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def flush(self) -> list[Part]:
        return []


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments whose JSON text this is; None if it is not the text of an object.

    Calls that we report as finished and calls that clients send back are read by this alone.
    """
    try:
        # It refuses more than 200 levels of brackets, which templates could not write.
        from_json(text)
        # It refuses numbers that no float can hold.
        arguments = msgspec.json.decode(text)
    except (ValueError, TypeError):  # The latter of half a surrogate pair.
        return None
    return arguments if isinstance(arguments, dict) else None


def joined(parts: list[Part]) -> list[Part]:
    """Merge adjacent parts of one kind."""
    if len(parts) < 2:  # As of most pieces.
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
