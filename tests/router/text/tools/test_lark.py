"""The parts of a grammar, as llguidance takes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from router.text.tools.lark import Tool, arguments, literal, objects, schema
from wire.errors import ErrorCode, WireError


def problem(grammar: str) -> str:
    return LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))


@pytest.mark.parametrize("text", ['a"b', "\\", "\n\t", "é日🎉", "{}", "//", "\x07"])
def test_a_literal_of_any_text(text: str) -> None:
    assert problem(f"start: {literal(text)}") == ""


def test_a_call_of_every_tool() -> None:
    tools = [Tool("get", {"properties": {"a": {"type": "integer"}}}), Tool('q"', {})]
    assert problem("start: object\n" + objects(tools, "arguments")) == ""


def test_what_a_schema_says_to_llguidance_is_not_heard() -> None:
    hostile = {"x-guidance": {"lenient": True}, "not": {}}
    assert "not" in problem(f"start: {schema(hostile)}")
    nested = {"properties": {"a": hostile}, "type": "object"}
    assert "not" in problem(f"start: {schema(nested)}")
    assert problem(f"start: {schema({'type': 'object'}, json_allowed_escapes='n')}") == ""


@pytest.mark.parametrize("kind", ["string", ["object", "null"], 3])
def test_arguments_are_an_object(kind: Any) -> None:
    assert json.loads(arguments(Tool("get", {})).removeprefix("%json"))["type"] == "object"
    with pytest.raises(WireError, match="'get' must have the type 'object'") as caught:
        arguments(Tool("get", {"type": kind}))
    assert caught.value.code == ErrorCode.INVALID_REQUEST
