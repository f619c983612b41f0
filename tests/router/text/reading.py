"""Texts read whole and in pieces, for the tests of every family."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable

from router.text.output_parts import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Part,
    Reader,
    arguments_of,
    joined,
)
from router.text.scan import AnswerReader, Scan, Steps

Read = Callable[[Scan], Steps[None]]


def read_pieces(reader: Reader, pieces: Iterable[str]) -> list[Part]:
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return joined([*parts, *reader.flush()])


def read_whole(read: Read, text: str, max_calls: int | None = None) -> list[Part]:
    return read_pieces(AnswerReader(read, max_calls), [text])


def summary(parts: Iterable[Part]) -> list[object]:
    """The parts as short as can be: content as text, calls as (name, arguments' text).

    Those calls are finished whose arguments parse, and no others.
    """
    short, finished, parsed = list[object](), list[int](), list[int]()
    for part in parts:
        match part:
            case Content(text):
                short.append(text)
            case CallStart(_, name):
                short.append((name, ""))
            case CallArguments(_, text):
                last = short.pop()
                assert isinstance(last, tuple)
                short.append((last[0], last[1] + text))
                if arguments_of(last[1] + text) is not None:
                    parsed.append(part.index)
            case CallEnd(index):
                finished.append(index)
            case _:
                short.append(part)
    assert finished == parsed
    return short


def calls(parts: Iterable[Part]) -> list[tuple[str, object]]:
    """The calls alone, with their arguments parsed."""
    found = (it for it in summary(parts) if isinstance(it, tuple))
    return [(name, json.loads(text)) for name, text in found]


def cut(text: str, chance: random.Random) -> list[str]:
    """The text in pieces: mostly as short as tokens, now and then one character each."""
    longest = chance.choice((1, 3, 8, 40))
    pieces = list[str]()
    while text:
        size = chance.randint(1, longest)
        pieces.append(text[:size])
        text = text[size:]
    return pieces
