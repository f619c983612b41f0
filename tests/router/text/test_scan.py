"""The rules of all families: what is held, what is layout, and how many calls there are."""

from __future__ import annotations

import pytest

from router.text.output_parts import CallArguments, CallEnd, CallStart, Content, Reasoning
from router.text.scan import AnswerReader, Scan, Steps
from router.text.tools import hermes
from tests.router.text.reading import read_pieces, read_whole, summary

CALL = '<tool_call>{"name": "get", "arguments": {"a": "x y"}}</tool_call>'


def test_arguments_are_given_as_they_come() -> None:
    reader = AnswerReader(hermes.read)
    assert reader.feed(CALL[:33]) == []  # up to the colon after `arguments`
    given = [reader.feed(char) for char in CALL[33:]]
    assert [it for it in given if it][:4] == [
        [CallStart(0, "get"), CallArguments(0, "{")],
        *([CallArguments(0, char)] for char in '"a"'),
    ]
    # The call ends with the character behind its arguments, not where the text does.
    assert [it for it in given if it][-2:] == [[CallArguments(0, "}")], [CallEnd(0)]]
    assert given[-1] == reader.flush() == []


def test_content_is_held_only_as_long_as_it_may_be_a_call_or_layout() -> None:
    reader = AnswerReader(hermes.read)
    pieces = ["a <", "b", " ", "c <tool", "_call> {", '"name"', ": 1", " d"]
    given = [summary(reader.feed(piece)) for piece in pieces]
    assert given == [["a"], [" <b"], [], [" c"], [], [], [' <tool_call> {"name": 1'], [" d"]]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_calls_beyond_the_most_are_left_out(most: int) -> None:
    parts = read_whole(hermes.read, f"a {CALL} b {CALL} c", most)
    call = ("get", '{"a": "x y"}')
    assert (
        summary(parts)
        == {
            0: ["a\nb\nc"],
            1: ["a", call, "\nb\nc"],
            2: ["a", call, "\nb", call, "\nc"],
        }[most]
    )


def test_a_long_answer_is_read_in_one_go() -> None:
    text = "word \\\\" * 50_000
    whole = read_whole(hermes.read, CALL.replace("x y", text) + text)
    arguments = CallArguments(0, f'{{"a": "{text}"}}')
    assert whole == [CallStart(0, "get"), arguments, CallEnd(0), Content(text)]


def test_a_generator_may_read_reasoning_too() -> None:
    def read(scan: Scan) -> Steps[None]:
        scan.begin_reasoning()
        if (yield from scan.until("|")):
            scan.end_reasoning()
        yield from scan.until()

    assert read_pieces(AnswerReader(read), [" a", "b |", "\nc|d "]) == [
        *(Reasoning("ab"), Content("c|d ")),
    ]
    assert read_pieces(AnswerReader(read), ["a "]) == [Reasoning("a ")]
