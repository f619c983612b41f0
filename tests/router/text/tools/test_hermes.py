"""Hermes calls: where they begin and end, and what of broken ones is content."""

from __future__ import annotations

import pytest

from router.text.tools import hermes
from tests.router.text.reading import read_whole, summary

CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
GET = ("get", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, [GET]),
        (f"Let me see.\n{CALL}\n", ["Let me see.", GET]),
        (f"{CALL}\n{CALL}", [GET, GET]),
        (f"{CALL}\nDone. ", [GET, "Done. "]),
        (CALL.replace("\n", ""), [GET]),
        # Without its end, or with another call at once.
        (CALL.removesuffix("</tool_call>"), [GET]),
        (CALL.removesuffix("</tool_call>") + CALL, [GET, GET]),
        # A brace too few, a brace too many.
        ('<tool_call>{"name": "get", "arguments": {"a": 1}</tool_call>!', [GET, "!"]),
        ('<tool_call>{"name": "get", "arguments": {"a": 1</tool_call>!', [("get", '{"a": 1'), "!"]),
        ('<tool_call>{"name": "get", "arguments": {"a": 1}}}</tool_call>!', [GET, "}!"]),
        # What is no call.
        ("<tool_call>get</tool_call>", ["<tool_call>get</tool_call>"]),
        ("a </tool_call> b", ["a </tool_call> b"]),
        (f"{CALL}</tool_call> b", [GET, "</tool_call> b"]),
        ("a <tool_call", ["a <tool_call"]),
        (f"<tool_call>{CALL}", ["<tool_call>", GET]),
        (f"<tool_c{CALL}", ["<tool_c", GET]),
        (f'<tool_call>{{"name": "<tool{CALL[4:]}', [f'<tool_call>{{"name": "<tool{CALL[4:]}']),
        (f'<tool_call>{{"name": <tool_{CALL}', ['<tool_call>{"name": <tool_', GET]),
        # The marker in a string is text.
        (
            '<tool_call>{"name": "get", "arguments": {"a": "</tool_call>{\\"}"}}</tool_call>',
            [("get", '{"a": "</tool_call>{\\"}"}')],
        ),
    ],
)
def test_calls_and_content(text: str, expected: list[object]) -> None:
    assert summary(read_whole(hermes.read, text)) == expected
