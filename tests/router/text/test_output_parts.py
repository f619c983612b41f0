"""Parts that belong together are joined, and no others."""

from __future__ import annotations

from router.text.output_parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    PlainReader,
    Reasoning,
    joined,
)


def test_neighbours_of_one_kind_become_one() -> None:
    parts: list[Part] = [
        *(Reasoning("a"), Reasoning("b"), Content("c"), Content("d")),
        *(CallStart(0, "f"), CallArguments(0, "{"), CallArguments(0, "}")),
        *(CallArguments(1, "{"), CallStart(2, "g"), CallStart(3, "h"), Content("e")),
    ]
    assert joined(parts) == [
        *(Reasoning("ab"), Content("cd"), CallStart(0, "f"), CallArguments(0, "{}")),
        *(CallArguments(1, "{"), CallStart(2, "g"), CallStart(3, "h"), Content("e")),
    ]


def test_where_nothing_is_read_all_is_content() -> None:
    reader = PlainReader()
    assert reader.feed("<think>") == [Content("<think>")]
    assert reader.feed("") == reader.flush() == []
