"""Mistral's calls: a list after the mark, or a name and its arguments after each."""

from __future__ import annotations

import pytest

from router.text.tools import mistral
from tests.router.text.reading import read_whole, summary

CALL = '{"name": "get", "arguments": {"a": 1}}'
GET = ("get", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[TOOL_CALLS][{CALL}]", [GET]),
        (f"I look. [TOOL_CALLS] [{CALL}, {CALL}] done", ["I look.", GET, GET, "\ndone"]),
        (f"[TOOL_CALLS][{CALL},", [GET]),
        (f"[TOOL_CALLS][{CALL}; so", [GET, "; so"]),
        ('[TOOL_CALLS]get{"a": 1}', [GET]),
        ('[TOOL_CALLS]get[ARGS]{"a": 1}[TOOL_CALLS]get[ARGS]{"a": 1}', [GET, GET]),
        ('[TOOL_CALLS]get[CALL_ID]abc1[ARGS]{"a": 1}', [GET]),
        ('[TOOL_CALLS]a.b-c_d{"a": 1}', [("a.b-c_d", '{"a": 1}')]),
        ('[TOOL_CALLS]get[TOOL_CALLS]get{"a": 1}', ["[TOOL_CALLS]get", GET]),
        # No calls.
        ("[TOOL_CALLS]", ["[TOOL_CALLS]"]),
        ("[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
        ("[TOOL_CALLS]{}", ["[TOOL_CALLS]{}"]),
        ("[TOOL_CALLS]get me", ["[TOOL_CALLS]get me"]),
        ("[TOOL_CALLS]get[CALL_ID]a b", ["[TOOL_CALLS]get[CALL_ID]a b"]),
        (f"[{CALL}] and [TOOL", [f"[{CALL}] and [TOOL"]),
    ],
)
def test_calls_and_content(text: str, expected: list[object]) -> None:
    assert summary(read_whole(mistral.read, text)) == expected
