"""Calls as JSON objects: any order of members, arguments as the model wrote them."""

from __future__ import annotations

import json
import random

import pytest

from router.text.output_parts import Part
from router.text.scan import Scan, Steps
from router.text.tools.json_call import json_call
from tests.router.text.reading import read_whole, summary
from tests.router.text.texts import value


def read(text: str, **options: bool) -> list[Part]:
    def steps(scan: Scan) -> Steps[None]:
        yield from json_call(scan, breaks="<", **options)
        yield from scan.until()

    return read_whole(steps, text)


@pytest.mark.parametrize(
    ("text", "arguments", "rest"),
    [
        ('{"name": "get", "arguments": {"a": 1}}', '{"a": 1}', ""),
        ('{"name":"get","parameters":{}}', "{}", ""),
        ('{ "name" : "get" ,\n"arguments" : { "a":[{}] } } ', '{ "a":[{}] }', ""),
        # The arguments first, or other members.
        ('{"arguments": {"a": "}"}, "name": "get"}!', '{"a": "}"}', "!"),
        ('{"arguments": {}, "id": [1, "]"], "name": "get", "x": {}}!', "{}", "!"),
        ('{"id": null, "name": "get", "arguments": {}, "type": "function"}!', "{}", "!"),
        ('{"name": "get", "id": -1.5}!', "{}", "!"),
        ('{"name": "get"}', "{}", ""),
        ('{"name": "\\u0067et", "arguments": {}}', "{}", ""),
        # Of two of a name the first.
        ('{"name": "get", "name": "set", "arguments": {}}', "{}", ""),
        ('{"arguments": {"a": 1}, "arguments": {}, "name": "get"}', '{"a": 1}', ""),
        # Once it has begun it is a call, whatever comes.
        ('{"name": "get", "arguments": {"a": 1', '{"a": 1', ""),
        ('{"name": "get", "arguments": {"a": "x', '{"a": "x', ""),
        ('{"name": "get", "arguments": {a: \'b\',}}', "{a: 'b',}", ""),
        ('{"name": "get", "arguments": {"a": 1 <end>', '{"a": 1 ', "<end>"),
        ('{"name": "get", "arguments": {}, "id": 3', "{}", ""),
        ('{"name": "get", "arguments": {}, id} so', "{}", ", id} so"),
        ('{"name": "get", "arguments": {}, "id":} so', "{}", ', "id":} so'),
        ('{"name": "get", "arguments": {}} so', "{}", "so"),
    ],
)
def test_a_call(text: str, arguments: str, rest: str) -> None:
    assert summary(read(text)) == [("get", arguments), *([rest] if rest else [])]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}", "{name", '{"name"', '{"name": "get"', '{"name": "get", "arguments": '),
        *('{"name": 3, "arguments": {}}', '{"name": "", "arguments": {}}', '{"name" "get"}'),
        *('{"name": "get", "arguments": [1]}', '{"name": "get", "arguments": "{}"}'),
        *('{"arguments": {}}', '{"arguments": {}, "arguments": {}}', '{"name": "get";}'),
        *('{"name": "\\ud800", "arguments": {}}', '{"name": "a\nb", "arguments": {}}'),
        *('{"id": , "name": "get"}', '["name", "get"]', '"name"'),
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert summary(read(text)) == ([text] if text else [])


def test_where_arguments_tell_calls_from_content() -> None:
    assert summary(read('{"name": "Mia"}', needs_arguments=True)) == ['{"name": "Mia"}']
    text = '{"name": "Mia", "parameters": {}}'
    assert summary(read(text, needs_arguments=True)) == [("Mia", "{}")]


def test_arguments_are_the_text_of_the_model() -> None:
    chance = random.Random(1)
    for _ in range(300):
        arguments = {"a": value(chance, 4), "b": value(chance, 4)}
        text = json.dumps(
            arguments, ensure_ascii=chance.random() < 0.5, indent=chance.choice((None, 2))
        )
        assert summary(read(f'{{"name": "get", "arguments": {text}}}')) == [("get", text)]
        assert summary(read(f'{{"arguments": {text}, "name": "get"}}')) == [("get", text)]


def test_deep_brackets_are_counted() -> None:
    text = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert summary(read(f'{{"name": "get", "arguments": {text}}}')) == [("get", text)]
