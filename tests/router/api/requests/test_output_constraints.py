"""Constraints on answers: each is a structure that llguidance can follow."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.api.errors import HttpError
from router.api.requests.conversation import Conversation, Tool, ToolChoice
from router.api.requests.output_constraints import constraint
from router.api.requests.structures import Wanted
from router.text.output_parser import AnswerSyntax
from router.text.tokenizer import Tokenizer
from wire.options import MAX_STRUCTURE_LENGTH
from wire.process.model import locate
from wire.process.structured_output import grammar_of

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
    matcher = LLMatcher(WORDS, grammar_of(wanted.to_structure()))
    assert not matcher.is_error(), matcher.get_error()
    tokens = WORDS.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def of(conversation: Conversation, wanted: Wanted | None = None, **about: Any) -> Wanted | None:
    about = {"is_reasoning": False} | about
    return constraint(about.pop("by", syntax()), conversation, wanted, **about)


def test_nothing_is_held_that_nobody_asked_to() -> None:
    assert of(asked()) is None
    assert of(asked(WEATHER)) is None
    assert of(asked(), NUMBER) is NUMBER
    strict, none = WEATHER._replace(is_strict=True), ToolChoice("none")
    assert of(asked(strict, tool_choice=none)) is None
    assert of(asked(strict, tool_choice=none), NUMBER) is NUMBER


def test_calls_that_must_be_made() -> None:
    wanted = of(asked(WEATHER, CLOCK, tool_choice=ToolChoice("required")))
    assert allows(wanted, CALL) and allows(wanted, TIME) and allows(wanted, f"{CALL}\n{TIME}")
    assert not allows(wanted, "Sunny.") and not allows(wanted, NO_CITY)
    assert not allows(wanted, TIME.replace("{}", '{"a": 1}')), "it takes no arguments"


def test_one_call_where_there_is_to_be_one() -> None:
    choice = ToolChoice("required")
    wanted = of(asked(WEATHER, CLOCK, tool_choice=choice, has_parallel_calls=False))
    assert allows(wanted, TIME) and not allows(wanted, f"{CALL}\n{TIME}")


def test_a_named_tool_is_called_once_and_no_other() -> None:
    wanted = of(asked(WEATHER, CLOCK, tool_choice=ToolChoice("named", ("clock",))))
    assert allows(wanted, TIME)
    assert not allows(wanted, CALL) and not allows(wanted, f"{TIME}\n{TIME}")


def test_only_allowed_tools_are_called() -> None:
    required = of(asked(WEATHER, CLOCK, tool_choice=ToolChoice("required", ("clock",))))
    assert allows(required, TIME) and allows(required, f"{TIME}\n{TIME}")
    assert not allows(required, CALL) and not allows(required, "Sunny.")
    auto = ToolChoice("auto", ("clock",))
    wanted = of(asked(WEATHER, CLOCK, tool_choice=auto))
    assert allows(wanted, "Sunny.") and allows(wanted, f"Let me see. {TIME}")
    assert not allows(wanted, CALL) and not allows(wanted, f"Let me see. {TIME}\n{CALL}")
    formatted = of(asked(WEATHER, CLOCK, tool_choice=auto), NUMBER)
    assert allows(formatted, "5") and allows(formatted, TIME) and not allows(formatted, CALL)
    assert of(asked(CLOCK, tool_choice=auto)) is None, "there is no other"


def test_calls_that_must_be_made_leave_no_room_for_a_format() -> None:
    wanted = of(asked(WEATHER, tool_choice=ToolChoice("required")), NUMBER)
    assert allows(wanted, CALL) and not allows(wanted, "5")


def test_strict_tools_are_held_to_their_schema_if_they_are_called() -> None:
    strict = WEATHER._replace(is_strict=True)
    wanted = of(asked(strict, CLOCK))
    assert allows(wanted, "Sunny.") and allows(wanted, f"Let me see. {CALL}")
    assert not allows(wanted, f"Let me see. {NO_CITY}")
    assert allows(wanted, TIME.replace("{}", '{"a": 1}')), "the others are not"


@pytest.mark.parametrize(("form", "text"), [(NUMBER, "5"), (DIGITS, "5/6")])
def test_a_format_leaves_room_for_calls(form: Wanted, text: str) -> None:
    wanted = of(asked(WEATHER), form)
    assert allows(wanted, text) and allows(wanted, NO_CITY) and not allows(wanted, "Sunny.")
    assert allows(wanted, f"{NO_CITY}\n{NO_CITY}")
    one = of(asked(WEATHER, has_parallel_calls=False), form)
    assert allows(one, NO_CITY) and not allows(one, f"{NO_CITY}\n{NO_CITY}")


@pytest.mark.parametrize(("form", "text"), [(NUMBER, "5"), (DIGITS, "5/6")])
def test_a_format_begins_after_reasoning(form: Wanted, text: str) -> None:
    by = syntax("<think></think>")
    wanted = of(asked(), form, by=by)
    assert allows(wanted, text) and allows(wanted, f"<think>Hm.</think>\n{text}")
    assert not allows(wanted, "<think>Hm.</think>\nSunny.")
    inside = of(asked(), form, by=by, is_reasoning=True)
    assert allows(inside, f"Hm.</think>\n{text}") and not allows(inside, text)


def test_tools_too_long_for_a_structure_are_refused_by_name() -> None:
    def forced(num_more: int) -> Wanted | None:
        long = {"type": "object", "description": "x" * (MAX_STRUCTURE_LENGTH + num_more)}
        return of(asked(Tool("t", parameters=long), tool_choice=ToolChoice("required")))

    with pytest.raises(HttpError, match=r"tool_choice: needs a grammar of \d+ char") as caught:
        forced(0)
    num_over = int(caught.value.message.split()[5]) - MAX_STRUCTURE_LENGTH
    longest = forced(-num_over)
    assert longest is not None and len(longest.text) == MAX_STRUCTURE_LENGTH
    with pytest.raises(HttpError):
        forced(1 - num_over)


@pytest.mark.parametrize("conversation", [asked(), asked(WEATHER)])
def test_the_json_of_a_format_looks_the_same_beside_tools(conversation: Conversation) -> None:
    object_of_a = '{"properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    wanted = of(conversation, Wanted("response_format", "json_schema", object_of_a))
    assert allows(wanted, '{"a": 5}')
    assert not allows(wanted, '{\n"a": 5}') and not allows(wanted, '{"a":5}')


@pytest.mark.parametrize("text", ['{"x-guidance": {}}', "{no JSON"])
def test_what_is_no_schema_is_refused_by_name_beside_tools(text: str) -> None:
    with pytest.raises(HttpError) as caught:
        of(asked(WEATHER), Wanted("response_format", "json_schema", text))
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("regex", "text"),
    [(r"a/b", "a/b"), (r"a\/b", "a/b"), (r"a\\/b", r"a\/b"), ("[/]", "/"), ("a\n/", "a\n/")],
)
def test_a_slash_ends_no_regular_expression(regex: str, text: str) -> None:
    wanted = of(asked(WEATHER), Wanted("structured_outputs.regex", "regex", regex))
    assert allows(wanted, text) and not allows(wanted, "b")


BAD = Tool("sums", parameters={"type": "object", "properties": {"a": 5}})


@pytest.mark.parametrize("template", ["<tool_call>", "[TOOL_CALLS]"])
@pytest.mark.parametrize(
    "conversation",
    [
        asked(WEATHER, BAD, tool_choice=ToolChoice("required")),
        asked(WEATHER, BAD, tool_choice=ToolChoice("named", ("sums",))),
        asked(WEATHER._replace(is_strict=True), BAD._replace(is_strict=True)),
    ],
)
def test_a_tool_whose_schema_is_none_is_named(conversation: Conversation, template: str) -> None:
    wanted = of(conversation, by=syntax(template))
    assert wanted is not None
    with pytest.raises(HttpError) as caught:
        wanted.to_structure()
    said = "tools: the parameters of 'sums': schema must be an object or boolean"
    assert (caught.value.param, caught.value.message) == ("tools", said)
