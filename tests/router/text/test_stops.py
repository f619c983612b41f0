"""Stop strings: against a naive reference, in every cutting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stops import StopAutomaton, StopMatcher

LETTERS = st.text(alphabet="abé", max_size=24)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=5)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(StopAutomaton(stops))
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.is_stopped:
            return shown, True
    return shown + matcher.flush(), False


@given(LETTERS, STOPS, st.data())
def test_any_cutting_gives_what_the_naive_search_gives(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(pieces, stops) == naive(text, stops)


@given(LETTERS, STOPS)
def test_as_little_as_possible_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopAutomaton(stops))
    shown = matcher.feed(text)
    if not matcher.is_stopped:
        held = max(
            (
                n
                for n in range(len(text) + 1)
                if any(s.startswith(text[len(text) - n :]) for s in stops)
            ),
        )
        assert shown == text[: len(text) - held]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopAutomaton(["a", ""])
