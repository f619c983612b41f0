"""Bounds on a grammar in llguidance's dialect of Lark, before it is compiled.

A terminal is compiled with everything it names in its place, so a few lines may stand for millions
of parts: `A: B B`, `B: C C`, and so on.  Rules of rules, and brackets, are followed by recursion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

# Tokens as llguidance reads them: a difference could hide something from us.  An unclosed one
# reaches to the end, so that nothing is read twice.
COMMENT: Final = r"//[^\n]*|\#[^\n]*"
TEXT: Final = r'"(?:\\.|[^"\\\n]+)*"?'  # on one line; patterns may go on over several
PATTERN: Final = r"/(?P<pattern>(?:\\.|[^/\\]+)+)/?"
TOKEN_OF_MODEL: Final = r"<[^<>\s]+>"
_TERMINAL: Final = r"_?[A-Z][A-Z0-9_-]*"
_RULE: Final = r"!?[?_]?[a-z][a-z0-9_-]*"
# Between a name and the colon by which it is defined: a parameter, a priority, options.
_OPTIONS: Final = r'\[(?:"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|[^\[\]"/:])*+\]'
_GAP: Final = r"[ \t]*+"
_COLON: Final = (
    rf"{_GAP}(?:::{_GAP}_{_GAP})?(?:\.{_GAP}\d+{_GAP})?(?P<options>{_OPTIONS})?{_GAP}:(?!:)"
)
_WORD: Final = re.compile(
    rf"{COMMENT}|{TOKEN_OF_MODEL}|{PATTERN}"
    rf"|(?P<text>{TEXT})(?P<is_caseless>i?)"
    # A definition need not begin a line: some statements end without one.
    rf"|(?P<defined>(?P<terminal>{_TERMINAL})|{_RULE})(?={_COLON})"
    rf"|(?P<name>{_TERMINAL})|{_RULE}"
    r"|(?P<statement>%(?:ignore|import|declare|override|llguidance))"
    r"|(?P<repeats>[?*+~]|\{)"
    r"|(?P<opens>[(\[])|(?P<closes>[)\]])"
    r"|\s+"  # or each space would be tried as all of these
)


def depth(lark: str) -> int:
    """Return how deep llguidance may recurse: into all definitions, with the brackets in each."""
    total = deepest = num_open = 0
    for word in _WORD.finditer(lark):
        if word["opens"]:
            num_open += 1
            deepest = max(deepest, num_open)
        elif word["closes"]:
            num_open = max(num_open - 1, 0)
        elif word["defined"] or word["statement"]:
            total += 1 + deepest
            deepest = num_open = 0
    return total + deepest


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
    for number, word in enumerate(_WORD.finditer(lark)):
        if word["defined"] or word["statement"]:
            current = word["terminal"]
            if word["options"] or word["statement"] == "%ignore":
                current = f"{number}"  # nobody names it
            if current is not None:
                own.setdefault(current, 0)
                names.setdefault(current, [])
        elif current is None:
            pass
        elif name := word["name"]:
            names[current].append(name)
        elif text := word["pattern"]:
            own[current] += len(text)
        elif text := word["text"]:
            own[current] += len(text) if word["is_caseless"] else 1
        elif word["repeats"]:
            own[current] += 1
    return own, names
