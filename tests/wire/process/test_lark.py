"""Lengths of the terminals of a grammar with the terminals they name, and its depth."""

from __future__ import annotations

import pytest

from wire.process.lark import depth, lengths


@pytest.mark.parametrize(
    ("lark", "parts"),
    [
        ('start: "a" "b"', []),  # of a rule, each text is a terminal of its own
        ('A: "long text"', [1]),
        ('A: "text"i', [6]),
        ("A: /[a-z]+/", [6]),
        ('A: "a"? ("b" | "c"){2,5}', [5]),
        ('A: B B\nB: "x" "y"', [2, 4]),
        ('A: B\n | B\n\n | B\nB: "x"', [1, 3]),
        ('A: "x" // "y" B\n  # "z"\nB: "x"', [1, 1]),
        ('A: /x\n# no comment B/ B\nB: "x"', [1, 17]),
        ('A: "B /" B\nB: "x"', [1, 2]),
        ("A: UNKNOWN UNKNOWN", [2]),
        ('A: A "x"', [2]),  # which llguidance refuses
        ('A: B\nB: C\nC: "x" A', [1, 1, 2]),
        ('a[lazy]: "x"? B\n?b[stop="; A"]: B\nc: B B B\nB: "x"', [1, 3, 2]),
        ('start: "x"\n%ignore /[ ]/ "x"', [4]),
        ("A: /never closed B", [14]),
        ('A: "never closed B', [1]),
        ('A-1: A-2 A-2\nA-2: "x" "y"', [2, 4]),
        ('A: <B/C> B /x/\nB: "x" "y"', [2, 3]),
        ('A.2: B\n%import common.C B: "x" "y"', [2, 2]),
        ('%llguidance {"a": true} A: "x" b["y"] %regex {"c": "d"}', [5]),
        ('start: b["x" A]\nb[stop="]:", lazy]: A "y"\nc::_: A\nA: "x"', [1, 3]),
        ('start: "x"\n%ignoreA A\nA: "x" "y"', [2, 4]),
    ],
)
def test_a_terminal_counts_the_parts_of_the_terminals_it_names(lark: str, parts: list[int]) -> None:
    assert sorted(lengths(lark)) == sorted(parts)


def test_terminals_that_double_are_counted_at_once() -> None:
    lines = [f"T{n}: T{n + 1} T{n + 1}" for n in range(500)]
    assert max(lengths("\n".join([*lines, 'T500: "x"']))) == 2**500


def test_terminals_are_counted_in_any_order() -> None:
    lines = [f"T{n}: T{n + 1} T{n + 1}" for n in range(20)]
    for order in (lines, lines[::-1], lines[::2] + lines[1::2]):
        assert max(lengths("\n".join([*order, 'T20: "x"']))) == 2**20


@pytest.mark.parametrize(
    ("lark", "levels"),
    [
        ('start: "(" /[(]/ <(> # (', 1),
        ('start: a b\na: "x"\n  | c\nb: "x"', 3),
        ("start: ((A) [B (C)]) (D)", 4),
        ('start: (A)\n%ignore "x"\n!?a: [[B]]\nA: "x"', 7),
        ("start: ))) ((A", 3),
    ],
)
def test_each_definition_and_the_brackets_in_it_make_a_grammar_deeper(
    lark: str, levels: int
) -> None:
    assert depth(lark) == levels
