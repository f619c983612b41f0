"""The parts of an answer: content, reasoning and tool calls, and what a reader of them is.

A reader turns the text of an answer into parts, piece by piece as the text comes.  What it has
given is never taken back, and depends on the text alone, not on how the text was cut: the parts of
all pieces, `joined`, are the parts of the whole.
"""

from __future__ import annotations

from itertools import groupby
from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True):
    """What the model says to whoever asked."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """What the model says to itself before it answers."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A call of a tool begins; calls are counted from 0."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A further piece of the JSON text of the arguments of call `index`."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


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


def joined(parts: list[Part]) -> list[Part]:
    """Return the same parts with neighbours of one kind made one."""
    if len(parts) < 2:  # As of most pieces.
        return parts
    together = list[Part]()
    for _, group in groupby(parts, _kind):
        first, *others = group
        if isinstance(first, CallStart):
            together += [first, *others]
        else:
            texts = [first.text, *(part.text for part in others if not isinstance(part, CallStart))]
            together.append(msgspec.structs.replace(first, text="".join(texts)))
    return together


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, CallStart | CallArguments) else 0
