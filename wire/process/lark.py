"""Estimate the cost of a grammar in llguidance's Lark dialect, before it is compiled.

llguidance expands every terminal that a terminal refers to, so a few lines may expand to millions
of parts: `A: B B`, `B: C C`, and so on.  It also recurses into nested rules and brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

# These tokens must be the same as llguidance's: a difference could hide a definition from the
# checks.  An unclosed token extends to the end of the text, so that nothing is scanned twice.
COMMENT: Final = r"//[^\n]*|\#[^\n]*"
TEXT: Final = r'"(?:\\.|[^"\\\n]+)*"?'  # on one line, unlike patterns
PATTERN: Final = r"/(?P<pattern>(?:\\.|[^/\\]+)+)/?"
TOKEN_OF_MODEL: Final = r"<[^<>\s]+>"
_TERMINAL: Final = r"_?[A-Z][A-Z0-9_-]*"
_RULE: Final = r"!?[?_]?[a-z][a-z0-9_-]*"
# Between a name and the colon of its definition there may be a parameter, a priority and options.
_OPTIONS: Final = r'\[(?:"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|[^\[\]"/:])*+\]'
_GAP: Final = r"[ \t]*+"
_COLON: Final = (
    rf"{_GAP}(?:::{_GAP}_{_GAP})?(?:\.{_GAP}\d+{_GAP})?(?P<options>{_OPTIONS})?{_GAP}:(?!:)"
)
_WORD: Final = re.compile(
    rf"{COMMENT}|{TOKEN_OF_MODEL}|{PATTERN}"
    rf"|(?P<text>{TEXT})(?P<is_caseless>i?)"
    # A definition need not start a line, because some statements end without a line break.
    rf"|(?P<defined>(?P<terminal>{_TERMINAL})|{_RULE})(?={_COLON})"
    rf"|(?P<name>{_TERMINAL})|{_RULE}"
    r"|(?P<statement>%(?:ignore|import|declare|override|llguidance))"
    r"|(?P<repeats>[?*+~]|\{)"
    r"|(?P<opens>[(\[])|(?P<closes>[)\]])"
    r"|\s+"  # otherwise every alternative would be tried at each space
)


def depth(lark: str) -> int:
    """Return an upper bound of llguidance's recursion depth: all definitions and their brackets."""
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
    """Yield the expanded size of each terminal in parts, including the terminals it refers to.

    A string counts as one part, a pattern or case-insensitive string as one part per character, and
    each repetition operator as one part.  Rules with options and %ignore statements count as
    terminals, because llguidance compiles them in the same way.
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
            # A terminal that is still unknown refers to itself; llguidance rejects it.
            known[name] = own[name] + sum(known.get(other, 1) for other in names[name])
            yield known[name]


def _parts(lark: str) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Return the number of parts of each terminal, and the terminals that each refers to."""
    own: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    current: str | None = None
    for number, word in enumerate(_WORD.finditer(lark)):
        if word["defined"] or word["statement"]:
            current = word["terminal"]
            if word["options"] or word["statement"] == "%ignore":
                current = f"{number}"  # a unique name that nothing refers to
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
