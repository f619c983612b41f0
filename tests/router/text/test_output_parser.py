"""Whole answers: read alike in every cut, and what a grammar forces is what the reader reads."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from router.text.output_parser import AnswerSyntax
from router.text.output_parts import CallStart, Content, PlainReader, Reasoning
from router.text.tokenizer import Tokenizer
from router.text.tools.lark import Tool
from tests.router.text.reading import calls, cut, read_pieces
from tests.router.text.texts import CALLS, MARKS, answers
from wire.process.model import DEMO

PLAIN = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
MARKED = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
MARKED.add_special_tokens(list(MARKS[2:]))
MARKED.add_tokens(list(MARKS[:2]))  # As Qwen has them: tokens, but not special.
END = 0
ENDS = set('"}])')
NUM_TEXTS = 250
NUM_CUTS = 4


def syntax(
    family: str, backend: tokenizers.Tokenizer = PLAIN, marks: str = "qwen3"
) -> AnswerSyntax:
    return AnswerSyntax("", Tokenizer(backend), tool_calls=family, reasoning_marks=marks)


@pytest.mark.parametrize("is_reasoning", [False, True])
@pytest.mark.parametrize("family", CALLS)
def test_any_cut_of_any_answer_gives_the_parts_of_the_whole(
    family: str, is_reasoning: bool
) -> None:
    chance = random.Random(f"{family} {is_reasoning}")
    of_model = syntax(family)
    num_calls = 0
    for text in answers(family, chance, NUM_TEXTS):
        most = chance.choice((None, None, 1))

        def read(pieces: list[str], most: int | None = most) -> list[Any]:
            reader = of_model.reader(is_reasoning=is_reasoning, has_tools=True, max_calls=most)
            return read_pieces(reader, pieces)

        whole = read([text])
        num_calls += sum(isinstance(part, CallStart) for part in whole)
        assert read(list(text)) == whole, text
        for _ in range(NUM_CUTS):
            pieces = cut(text, chance)
            assert read(pieces) == whole, pieces
    assert num_calls > NUM_TEXTS / 8


# With exponents, grammars allow numbers that no float can hold: no reader takes those.
NUMBER = {"type": "number", "minimum": -1000, "maximum": 1000}
TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "units": {"enum": ["C", 'F"']},
                "place": {"$ref": "#/$defs/place"},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"at": {"type": "array", "items": NUMBER}},
                    "additionalProperties": False,
                }
            },
        },
    ),
    Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}),
)
MATCHERS = {
    name: (backend, LLTokenizer(backend.to_str(), eos_token=END))
    for name, backend in (("plain", PLAIN), ("marked", MARKED))
}


def walk(kind: str, grammar: str, chance: random.Random, begin: str = "") -> list[int]:
    """Random tokens that the grammar allows, up to its end."""
    backend, tokenizer = MATCHERS[kind]
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
    tokens = list(backend.encode(begin).ids)
    assert matcher.consume_tokens(tokens), matcher.get_error()
    while not matcher.is_stopped():
        mask = matcher.compute_logit_bias()
        allowed = [token_id for token_id in range(tokenizer.vocab_size) if mask[token_id]]
        assert allowed, matcher.get_error()
        if len(tokens) > 70:  # Long enough: towards the end of strings, brackets and the text.
            closing = [t for t in allowed if t == END or set(backend.decode([t], False)) & ENDS]
            allowed = [END] if END in allowed else closing or allowed
        token_id = chance.choice(allowed)
        if token_id == END:
            break
        tokens.append(token_id)
        assert matcher.consume_token(token_id), matcher.get_error()
    return tokens


def text_of(of_model: AnswerSyntax, kind: str, tokens: list[int]) -> str:
    detokenizer = Tokenizer(MATCHERS[kind][0]).detokenizer(shown=of_model.shown(has_tools=True))
    return "".join([*map(detokenizer.feed, tokens), detokenizer.flush()])


@pytest.mark.parametrize("kind", MATCHERS)
@pytest.mark.parametrize("family", CALLS)
def test_what_a_grammar_forces_is_read_as_calls_that_are_valid(family: str, kind: str) -> None:
    chance = random.Random(f"{family} {kind}")
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    most = 0
    for index in range(20):
        is_several, is_reasoning = index % 2 == 0, index % 4 == 0
        thought = "hm</think>" if is_reasoning else "<think>hm</think>\n" if index % 8 == 1 else ""
        of_model = syntax(family, MATCHERS[kind][0], "qwen3" if thought else "none")
        rules = of_model.call_rules(TOOLS, is_several=is_several)
        grammar = of_model.grammar(rules, is_reasoning=is_reasoning)
        text = text_of(of_model, kind, walk(kind, grammar, chance, thought))
        reader = of_model.reader(is_reasoning=is_reasoning, has_tools=True)
        parts = read_pieces(reader, [text])
        assert not any(isinstance(part, Content) for part in parts), text
        found = calls(parts)
        assert found if is_several else len(found) == 1, text
        most = max(most, len(found))
        for name, arguments in found:
            jsonschema.validate(arguments, schemas[name])
    assert most > 1


@pytest.mark.parametrize("kind", MATCHERS)
@pytest.mark.parametrize(
    ("family", "begin"),
    [
        ("hermes", "I look. <tool_call>"),
        ("llama3_json", '{"na'),
        ("mistral", "So: [TOOL_CALLS]"),
        ("pythonic", "[get"),
    ],
)
def test_where_calls_are_not_required_those_that_begin_are_held_to_the_tools(
    family: str, begin: str, kind: str
) -> None:
    chance = random.Random(f"{family} {kind} {begin}")
    of_model = syntax(family, MATCHERS[kind][0], "none")
    rules = of_model.call_rules(TOOLS[:1], is_required=False, is_several=False)
    grammar = of_model.grammar(rules, is_reasoning=False)
    for _ in range(4):
        text = text_of(of_model, kind, walk(kind, grammar, chance, begin))
        parts = read_pieces(of_model.reader(is_reasoning=False, has_tools=True), [text])
        [(name, arguments)] = calls(parts)
        assert name == "get_weather"
        jsonschema.validate(arguments, TOOLS[0].parameters)
    plain = text_of(of_model, kind, walk(kind, grammar, chance, "Well, "))
    assert plain.startswith("Well, ")


LATER = Tool("f", {"properties": {"a": {}, "b": {"type": "integer"}}, "required": ["b"]})


@pytest.mark.parametrize(
    ("family", "text", "is_allowed"),
    [
        ("pythonic", "[f(b=1)]", True),
        ("pythonic", "[f(a=[], b=1)]", True),
        ("pythonic", "[f(a=[])]", False),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"b": 1}}]', True),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"b": 1}}]' * 2, False),
    ],
)
def test_what_a_grammar_allows(family: str, text: str, is_allowed: bool) -> None:
    backend, tokenizer = MATCHERS["plain"]
    of_model = syntax(family, marks="none")
    grammar = of_model.grammar(of_model.call_rules([LATER]), is_reasoning=False)
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
    tokens = backend.encode(text).ids
    is_whole = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    assert is_whole == is_allowed


def test_a_model_without_marks_has_content_only() -> None:
    of_model = AnswerSyntax("{{ messages }}", Tokenizer(PLAIN))
    assert not of_model.has_calls
    assert not of_model.has_reasoning
    assert of_model.shown(has_tools=True) == frozenset()
    assert isinstance(of_model.reader(is_reasoning=False, has_tools=True), PlainReader)


def test_reasoning_alone() -> None:
    of_model = syntax("none")
    reader = of_model.reader(is_reasoning=True, has_tools=True)
    parts = read_pieces(reader, ["so</think>\n<tool_call>"])
    assert parts == [Reasoning("so"), Content("<tool_call>")]


@pytest.mark.parametrize(
    ("family", "call"),
    [("llama3_json", '{"name": "get", "parameters": {}}'), ("pythonic", "[get()]")],
)
def test_what_was_nearly_reasoning_is_before_the_call(family: str, call: str) -> None:
    reader = syntax(family).reader(is_reasoning=False, has_tools=True)
    assert read_pieces(reader, [f"<th{call}"]) == [Content(f"<th{call}")]


def test_marks_of_tools_are_shown_only_with_tools() -> None:
    of_model = syntax("mistral", MARKED, "mistral")
    ids = {MARKED.token_to_id(mark) for mark in ("[THINK]", "[/THINK]")}
    assert of_model.shown(has_tools=False) == ids
    assert of_model.shown(has_tools=True) > ids


def test_a_grammar_after_reasoning_and_without() -> None:
    rules = "answer: " + json.dumps("yes")
    assert "thought" not in syntax("none", marks="none").grammar(rules, is_reasoning=False)
    for kind in MATCHERS:
        of_model = syntax("none", MATCHERS[kind][0])
        grammar = of_model.grammar(rules, is_reasoning=True)
        tokens = walk(kind, grammar, random.Random(1), "hm</think>")
        reader = of_model.reader(is_reasoning=True, has_tools=False)
        parts = read_pieces(reader, [text_of(of_model, kind, tokens)])
        assert parts == [Reasoning("hm"), Content("yes")]
