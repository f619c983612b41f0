"""Calls in Python's syntax, and their literals as JSON."""

from __future__ import annotations

import random
from typing import Any

import pytest

from router.text.tools import pythonic
from router.text.tools.lark import Tool, Wanted, literal
from tests.router.text.reading import calls, read_whole, summary
from tests.router.text.texts import value
from wire.errors import ErrorCode, WireError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[get(a=1)]", [("get", '{"a": 1}')]),
        ("[get(), a.b-c( x = 1 , )]", [("get", "{}"), ("a.b-c", '{"x": 1}')]),
        ("<|python_start|>[get()]<|python_end|>", [("get", "{}")]),
        (" [get()]\ndone", [("get", "{}"), "done"]),
        # Unfinished, or broken after it began.
        ("[get(a=1", [("get", '{"a": 1')]),
        ("[get(a=tru", [("get", '{"a": ')]),
        ("[get(a='x\ny')]", [("get", '{"a": "x'), "y')]"]),
        ("[get(a='x\\u12", [("get", '{"a": "x')]),
        ("[get(a=1), ", [("get", '{"a": 1}')]),
        ("[get(a=x + 1)] so", [("get", '{"a": '), "x + 1)] so"]),
        ("[get(a=[1 2])]", [("get", '{"a": [1'), "2])]"]),
        ("[get(a=1, 2)]", [("get", '{"a": 1'), ", 2)]"]),
        ("[get(a=nan)]", [("get", '{"a": '), "nan)]"]),
        ("[get(a={1: 2})]", [("get", '{"a": {'), "1: 2})]"]),
        # No calls.
        ("[text](link)", ["[text](link)"]),
        ("[f(x)]", ["[f(x)]"]),
        ("[]", ["[]"]),
        ("[1, 2]", ["[1, 2]"]),
        ("I see [get()]", ["I see [get()]"]),
        ("get()", ["get()"]),
    ],
)
def test_calls_and_content(text: str, expected: list[object]) -> None:
    assert summary(read_whole(pythonic.read, text)) == expected


@pytest.mark.parametrize(
    ("literal", "json"),
    [
        *(("True", "true"), ("false", "false"), ("None", "null"), ("-1.50e3", "-1.50e3")),
        *(("0x10", "16"), ("1_000", "1000"), (".5", "0.5"), ("+2", "2"), ("1.", "1.0")),
        *(("'a\"b'", '"a\\"b"'), ('"it\'s"', '"it\'s"'), ("'a\\'b'", '"a\'b"')),
        *((r"'\n\t\\\d'", r'"\n\t\\\\d"'), (r"'\x41\u00e9'", r'"A\u00e9"'), ("'é🎉'", '"é🎉"')),
        *((r"'\ud83d\ude00'", r'"\ud83d\ude00"'), (r"'\U0001f600'", '"😀"'), ("'\\\n'", '""')),
        (r"'\U0000d83d\x7f'", r'"\ud83d\u007f"'),
        *(("[1, (2,), {}]", "[1, [2], {}]"), ("{'a': {'b': []},}", '{"a": {"b": []}}')),
    ],
)
def test_a_literal(literal: str, json: str) -> None:
    assert summary(read_whole(pythonic.read, f"[get(a={literal})]")) == [
        ("get", f'{{"a": {json}}}')
    ]


def test_whatever_python_writes_is_read() -> None:
    chance = random.Random(1)
    for _ in range(400):
        arguments: dict[str, Any] = {"a": value(chance, 4), "b": value(chance, 4)}
        text = f"[get(a={arguments['a']!r}, b={arguments['b']!r})]"
        assert calls(read_whole(pythonic.read, text)) == [("get", arguments)]


def test_brackets_too_deep_end_the_call() -> None:
    [call, rest] = summary(read_whole(pythonic.read, "[get(a=" + "[" * 10_000))
    assert call == ("get", '{"a": ' + "[" * pythonic.MAX_DEPTH)
    assert rest == "[" * (10_000 - pythonic.MAX_DEPTH)


@pytest.mark.parametrize(
    "parameters",
    [
        {"anyOf": [{}]},
        {"properties": []},
        {"properties": {}, "required": "a"},
        {"properties": {"a b": {}}},
        {"properties": {"a": True}},
        {"required": [3]},
    ],
)
def test_parameters_that_are_no_list_of_arguments(parameters: dict[str, Any]) -> None:
    wanted = Wanted([Tool("get", parameters)], literal, is_several=True, is_required=True)
    with pytest.raises(WireError, match="'get'") as caught:
        pythonic.grammar(wanted)
    assert caught.value.code == ErrorCode.INVALID_REQUEST
