"""Calls in Python's syntax, and their literals as JSON."""

from __future__ import annotations

import random
from typing import Any

import pytest

from router.text.scan import AnswerReader
from router.text.tools import pythonic
from router.text.tools.lark import AllowedCalls, Tool, literal
from tests.router.text.reading import calls, read_pieces, read_whole, summary
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
        ("[get(a=1", [("get", '{"a": ')]),
        ("[get(a=1, b='x", [("get", '{"a": 1, "b": ')]),
        ("[get(a='x' 'y\\", [("get", '{"a": ')]),
        ("[get(a='x\ny')]", [("get", '{"a": '), "'x\ny')]"]),
        ("[get(a='x\\u12')]", [("get", '{"a": '), "'x\\u12')]"]),
        ("[get(a=)]", [("get", '{"a": '), ")]"]),
        ("[get(a=1]", [("get", '{"a": '), "1]"]),
        ("[get(a=*b)]", [("get", '{"a": '), "*b)]"]),
        ("[get(a=-True)]", [("get", '{"a": '), "-True)]"]),
        ("[get(a=1), ", [("get", '{"a": 1}')]),
        ("[get(a=x + 1)] so", [("get", '{"a": '), "x + 1)] so"]),
        ("[get(a=[1 2])]", [("get", '{"a": '), "[1 2])]"]),
        ("[get(a=1e999)]", [("get", '{"a": '), "1e999)]"]),
        ("[get(a=1j, b=2)]", [("get", '{"a": '), "1j, b=2)]"]),
        ("[get(a=b'x')]", [("get", '{"a": '), "b'x')]"]),
        ("[get(a={**{}})]", [("get", '{"a": '), "{**{}})]"]),
        ("[get(a={[]: 1})]", [("get", '{"a": '), "{[]: 1})]"]),
        (r"[get(a='\ud800')]", [("get", r'{"a": "\ud800"}')]),
        ("[get(a=1, 2)]", [("get", '{"a": 1'), ", 2)]"]),
        ("[get(a=nan)]", [("get", '{"a": '), "nan)]"]),
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
        *(("True", "true"), ("false", "false"), ("None", "null"), ("-1.50e3", "-1500.0")),
        *(("0x10", "16"), ("1_000", "1000"), (".5", "0.5"), ("+2", "2"), ("1.", "1.0")),
        *(("- 1", "-1"), ("9007199254740993", "9007199254740993"), ("-1e-9", "-1e-09")),
        *(("'a\"b'", '"a\\"b"'), ('"it\'s"', '"it\'s"'), ("'a\\'b'", '"a\'b"')),
        *((r"'\n\t\\\d'", r'"\n\t\\\\d"'), (r"'\x41\u00e9'", '"Aé"'), ("'é🎉'", '"é🎉"')),
        *((r"'\ud83d\ude00'", r'"\ud83d\ude00"'), (r"'\U0001f600'", '"😀"'), ("'\\\n'", '""')),
        (r"'\U0000d83d\x7f'", r'"\ud83d\u007f"'),
        *(("[1, (2,), {}]", "[1, [2], {}]"), ("{'a': {'b': []},}", '{"a": {"b": []}}')),
        *(("{1: 2}", '{"1": 2}'), ("{1, -2}", "[1, -2]"), ("(1)", "1"), ("()", "[]")),
        # Strings in three quotes, raw ones, and several in a row.
        ("'''a'b\n\"c'''", '"a\'b\\n\\"c"'),
        ('"""a""b\\""""', '"a\\"\\"b\\""'),
        *(("'a' \"b\"", '"ab"'), ("('a,'\n '(b')", '"a,(b"'), (r"r'\d'", r'"\\d"')),
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
    for depth in (pythonic.MAX_DEPTH, pythonic.MAX_DEPTH + 1, 10_000):
        value = "[" * depth + "]" * depth
        [call, *rest] = summary(read_whole(pythonic.read, f"[get(a={value})]"))
        is_read = depth == pythonic.MAX_DEPTH
        assert call == ("get", '{"a": ' + (value + "}" if is_read else ""))
        assert rest == ([] if is_read else [f"{value})]"])


@pytest.mark.parametrize("value", ["1,", "-", "not ", "()", "a.", "1+", "f(", "'a'", "{", "x if "])
@pytest.mark.parametrize("feeds", [1, 100, 1 << 20])
def test_however_much_there_is_it_is_read_as_a_literal_or_as_content(
    value: str, feeds: int
) -> None:
    text = f"[get(a=[{value * pythonic.MAX_LENGTH}])]"
    pieces = [text[place : place + feeds] for place in range(0, len(text), feeds)]
    [call, *rest] = summary(read_pieces(AnswerReader(pythonic.read), pieces))
    if value == "'a'":
        assert (call, rest) == (("get", '{"a": ["' + "a" * pythonic.MAX_LENGTH + '"]}'), [])
    else:
        assert (call, rest) == (("get", '{"a": '), [text.removeprefix("[get(a=")])


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
    wanted = AllowedCalls([Tool("get", parameters)], literal, is_several=True, is_required=True)
    with pytest.raises(WireError, match="'get'") as caught:
        pythonic.grammar(wanted)
    assert caught.value.code == ErrorCode.INVALID_REQUEST
