"""Structured output: each way to say it, what is refused, and that texts mean what they say."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.errors import HttpError
from router.api.requests.body import parse
from router.api.requests.structures import Wanted
from router.api.text import CompletionBody
from tests.router.api.asking import chatting, completion
from wire.options import MAX_STRUCTURE_LENGTH, Structure

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA)
EBNF = 'root ::= "a" | more+\nmore ::= [0-9]{2,3} "\\n"'


def chain(first: str, rule: str, length: int = 3000) -> str:
    rules = [rule.format(f"r{i}", f"r{i + 1}") for i in range(length)]
    return "\n".join([first, *rules, rule.format(f"r{length}", '"a"')])


def wanted(**fields: Any) -> Wanted:
    of_completion, of_chat = completion(**fields).wanted, chatting(**fields).wanted
    assert of_completion is not None and of_completion == of_chat
    return of_completion


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            TEXT,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
        ({"structured_outputs": {"json": TEXT}}, "json_schema", TEXT),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", 'b"']}}, "lark", 'start: "a" | "b\\""'),
        ({"structured_outputs": {"grammar": "start: /a+/"}}, "lark", "start: /a+/"),
        ({"structured_outputs": {"grammar": EBNF}}, "ebnf", EBNF),
        ({"guided_json": SCHEMA}, "json_schema", TEXT),
        ({"guided_json": f"\n{TEXT} "}, "json_schema", TEXT),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "lark", 'start: "a"'),
        ({"guided_grammar": "start: /a+/"}, "lark", "start: /a+/"),
        ({"guided_grammar": "x: /a+/\n start : x"}, "lark", "x: /a+/\n start : x"),
    ],
)
def test_every_way_to_say_it(fields: dict[str, Any], kind: str, text: str) -> None:
    assert wanted(**fields)[1:3] == (kind, text)
    wanted(**fields).to_structure()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None, "guided_json": None},
    ],
)
def test_or_not(fields: dict[str, Any]) -> None:
    assert completion(**fields).wanted is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"guided_regex": "a" * (MAX_STRUCTURE_LENGTH + 1)}, "guided_regex"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
        ),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    for body in (completion, chatting):
        with pytest.raises(HttpError) as caught:
            _ = body(**fields).wanted
        assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"type": "no such type"}}, "guided_json"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
        ({"guided_grammar": "what is this"}, "guided_grammar"),
        ({"guided_grammar": "root ::= " + "(" * 20_000}, "guided_grammar"),
        # Each rule is another one; llguidance would follow them until its stack is full.
        ({"guided_grammar": chain("start: r0", "{}: {}")}, "guided_grammar"),
        ({"guided_grammar": chain("root ::= r0", "{} ::= {}")}, "guided_grammar"),
    ],
)
def test_what_no_answer_can_be_held_to_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        wanted(**fields).to_structure()
    assert (caught.value.status, caught.value.param) == (400, param)


def takes(structure: Structure, text: str) -> bool:
    """Whether a text is one that the structure allows, byte for byte."""
    grammar = llguidance.grammar_from(structure.kind, structure.text)
    matcher = llguidance.LLMatcher(BYTES, grammar)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


class Bytes:
    """A tokenizer whose tokens are bytes."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


BYTES = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_choices_are_taken_literally(choices: list[str]) -> None:
    structure = wanted(guided_choice=choices).to_structure()
    assert all(takes(structure, choice) for choice in choices)
    assert not takes(structure, max(choices, key=len) + "x")


def test_a_schema_that_is_no_utf8_is_named() -> None:
    body = parse(CompletionBody, b'{"prompt": "hi", "guided_json": {"a": "\xff"}}')
    with pytest.raises(HttpError) as caught:
        _ = body.wanted
    assert caught.value.param == "guided_json"


def test_a_grammar_in_ebnf_means_the_same() -> None:
    structure = wanted(guided_grammar=EBNF).to_structure()
    assert takes(structure, "a") and takes(structure, "12\n345\n")
    assert not takes(structure, "1\n")
