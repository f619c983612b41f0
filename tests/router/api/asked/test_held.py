"""What answers to conversations are held to: every structure is one that llguidance can follow."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.api.asked.conversation import Conversation, Tool, ToolChoice
from router.api.asked.held import held
from router.api.asked.structures import Wanted
from router.api.errors import HttpError
from router.text.answer import AnswerSyntax
from router.text.tokenizer import Tokenizer
from wire.options import MAX_STRUCTURE_LENGTH
from wire.process.model import locate

DEMO = locate("demo")
WORDS = LLTokenizer(str(DEMO / "tokenizer.json"))
CITY = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
WEATHER, CLOCK = Tool("weather", parameters=CITY), Tool("clock")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NO_CITY = CALL.replace('"city": "Rome"', "")
TIME = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
NUMBER = Wanted("response_format", "json_schema", '{"type": "integer"}')
DIGITS = Wanted("structured_outputs.regex", "regex", "[0-9]/[0-9]")


def syntax(template: str = "<tool_call>") -> AnswerSyntax:
    return AnswerSyntax(template, Tokenizer.load(DEMO))


def asked(*tools: Tool, **fields: Any) -> Conversation:
    return Conversation(messages=[], tools=tools, **fields)


def allows(wanted: Wanted | None, text: str) -> bool:
    """Whether `text` is a whole answer."""
    assert wanted is not None
    structure = wanted.settle()
    grammar = {
        "lark": LLMatcher.grammar_from_lark,
        "regex": LLMatcher.grammar_from_regex,
        "json_schema": LLMatcher.grammar_from_json_schema,
    }[structure.kind](structure.text)
    matcher = LLMatcher(WORDS, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = WORDS.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def of(conversation: Conversation, wanted: Wanted | None = None, **about: Any) -> Wanted | None:
    about = {"is_reasoning": False} | about
    return held(about.pop("by", syntax()), conversation, wanted, **about)


def test_nothing_is_held_that_nobody_asked_to() -> None:
    assert of(asked()) is None
    assert of(asked(WEATHER)) is None
    assert of(asked(), NUMBER) is NUMBER


def test_calls_that_must_be_made() -> None:
    wanted = of(asked(WEATHER, CLOCK, tool_choice=ToolChoice("required")))
    assert allows(wanted, CALL) and allows(wanted, TIME) and allows(wanted, f"{CALL}\n{TIME}")
    assert not allows(wanted, "Sunny.") and not allows(wanted, NO_CITY)


def test_one_call_where_there_is_to_be_one() -> None:
    choice = ToolChoice("required")
    wanted = of(asked(WEATHER, CLOCK, tool_choice=choice, has_parallel_calls=False))
    assert allows(wanted, TIME) and not allows(wanted, f"{CALL}\n{TIME}")


def test_a_named_tool_is_called_once_and_no_other() -> None:
    wanted = of(asked(WEATHER, CLOCK, tool_choice=ToolChoice("named", "clock")))
    assert allows(wanted, TIME)
    assert not allows(wanted, CALL) and not allows(wanted, f"{TIME}\n{TIME}")


def test_calls_that_must_be_made_leave_no_room_for_a_format() -> None:
    wanted = of(asked(WEATHER, tool_choice=ToolChoice("required")), NUMBER)
    assert allows(wanted, CALL) and not allows(wanted, "5")


def test_strict_tools_are_held_to_their_schema_if_they_are_called() -> None:
    strict = WEATHER._replace(is_strict=True)
    wanted = of(asked(strict, CLOCK))
    assert allows(wanted, "Sunny.") and allows(wanted, f"Let me see. {CALL}")
    assert not allows(wanted, f"Let me see. {NO_CITY}")


@pytest.mark.parametrize(("form", "text"), [(NUMBER, "5"), (DIGITS, "5/6")])
def test_a_format_leaves_room_for_calls(form: Wanted, text: str) -> None:
    wanted = of(asked(WEATHER), form)
    assert allows(wanted, text) and allows(wanted, NO_CITY) and not allows(wanted, "Sunny.")


@pytest.mark.parametrize(("form", "text"), [(NUMBER, "5"), (DIGITS, "5/6")])
def test_a_format_begins_after_reasoning(form: Wanted, text: str) -> None:
    by = syntax("<think></think>")
    wanted = of(asked(), form, by=by)
    assert allows(wanted, text) and allows(wanted, f"<think>Hm.</think>\n{text}")
    assert not allows(wanted, "<think>Hm.</think>\nSunny.")
    inside = of(asked(), form, by=by, is_reasoning=True)
    assert allows(inside, f"Hm.</think>\n{text}") and not allows(inside, text)


def test_tools_too_long_for_a_structure_are_refused_by_name() -> None:
    long = {"type": "object", "description": "x" * MAX_STRUCTURE_LENGTH}
    with pytest.raises(HttpError, match="tool_choice: needs a grammar of"):
        of(asked(Tool("t", parameters=long), tool_choice=ToolChoice("required")))
