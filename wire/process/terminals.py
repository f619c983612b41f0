"""The terminals of a grammar in llguidance's Lark, and how long they are when written out.

A terminal is compiled with everything it names in its place, so a few lines may stand for millions
of parts: `A: B B`, `B: C C`, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

# Regular expressions may go on over several lines, texts may not.  What is not closed reaches to
# the end, so that nothing is read twice.
_TOKEN: Final = re.compile(
    r"//[^\n]*|\#[^\n]*"  # comments
    r'|(?P<text>"(?:\\.|[^"\\\n]+)*"?)(?P<is_caseless>i?)'
    r"|/(?P<pattern>(?:\\.|[^/\\]+)+)/?"
    # Lines that go on with what is above begin with a bar; every other one defines something.
    r"|(?P<statement>^[ \t]*(?:(?:(?P<terminal>_?[A-Z][A-Z0-9_]*)|[?!]*\w[\w-]*)(?P<options>\s*\[)?"
    r"|%\w+))"
    r"|(?P<name>\b_?[A-Z][A-Z0-9_]*)"
    r"|(?P<repeats>[?*+~]|\{)",
    re.MULTILINE,
)


def lengths(lark: str) -> Iterator[int]:
    """Yield how many parts each terminal has, those of all the terminals in it included.

    A text is one part, a pattern or a text in any case as many as it has characters, and what is
    repeated is one more, however often.  Rules with options are compiled as terminals are, and so
    is what is ignored.
    """
    own, names = _parts(lark)
    known: dict[str, int] = {}
    waiting, begun = list(own), set[str]()
    while waiting:
        name = waiting[-1]
        inner = set(names[name]) & own.keys() - known.keys() - begun
        begun.add(name)
        if inner and name not in known:
            waiting += inner
            continue
        waiting.pop()
        if name not in known:
            # One that is not known by now is a terminal in itself, which llguidance refuses.
            known[name] = own[name] + sum(known.get(other, 1) for other in names[name])
            yield known[name]


def _parts(lark: str) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Return of each terminal the number of its own parts, and the names in it."""
    own: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    current: str | None = None
    for number, token in enumerate(_TOKEN.finditer(lark)):
        if statement := token["statement"]:
            current = token["terminal"]
            if token["options"] or statement.strip() == "%ignore":
                current = f"{number}"  # nobody names it
            if current is not None:
                own.setdefault(current, 0)
                names.setdefault(current, [])
        elif current is None:
            pass
        elif name := token["name"]:
            names[current].append(name)
        elif text := token["pattern"]:
            own[current] += len(text)
        elif text := token["text"]:
            own[current] += len(text) if token["is_caseless"] else 1
        elif token["repeats"]:
            own[current] += 1
    return own, names
