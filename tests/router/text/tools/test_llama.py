"""Llama's calls in JSON: at the beginning or after a mark, several of them."""

from __future__ import annotations

import pytest

from router.text.tools import llama
from tests.router.text.reading import read_whole, summary

CALL = '{"name": "get", "parameters": {"a": 1}}'
GET = ("get", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, [GET]),
        (f"\n{CALL}\n", [GET]),
        (f"{CALL}; {CALL};\n{CALL}", [GET, GET, GET]),
        (f"{CALL}\n{CALL}", [GET, GET]),
        (f"<|python_tag|>{CALL}", [GET]),
        (f"I look.\n<|python_tag|>{CALL} done", ["I look.", GET, "\ndone"]),
        (f"<|python_start|>{CALL}<|python_end|>", [GET]),
        (f"{CALL}; and {CALL}", [GET, f"; and {CALL}"]),
        (f"{CALL};", [GET]),
        (f"{CALL}<|python_end|> so", [GET, "so"]),
        (f"{CALL}<|python_tag|> no", [GET, "<|python_tag|> no"]),
        # No calls.
        (f"See {CALL}", [f"See {CALL}"]),
        ('{"name": "Mia"}', ['{"name": "Mia"}']),
        ("<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
        ("a <|python_end|> b", ["a <|python_end|> b"]),
        (f"<|python_tag|><|python_tag|>{CALL}", ["<|python_tag|>", GET]),
    ],
)
def test_calls_and_content(text: str, expected: list[object]) -> None:
    assert summary(read_whole(llama.read, text)) == expected
