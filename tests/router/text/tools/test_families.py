"""Which family a chat template speaks, and which calls the grammar of each lets through."""

from __future__ import annotations

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from router.text.tools.families import FAMILIES, detect
from router.text.tools.lark import Tool, Wanted, literal
from wire.process.model import DEMO

BACKEND = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
TOKENIZER = LLTokenizer(BACKEND.to_str(), eos_token=0)
GET = Tool("get", {"properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (
            'return <tool_call>\\n{"name": <function-name>, "arguments": ...}\\n</tool_call>',
            "hermes",
        ),
        ("{{ '[TOOL_CALLS] [' ~ calls }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral"),
        ('Respond as {"name": name, "parameters": {}}. <|start_header_id|>', "llama3_json"),
        ("<|python_tag|> {{ '\"parameters\": ' }}", "llama3_json"),
        ("{{ '\"parameters\": ' }}<|header_start|>", "llama4_json"),
        ("Respond as [func_name1(a=b), func_name2(c)] <|start_header_id|>", "pythonic"),
        ("Use [func_name1(a=b)] <|header_start|>", "llama4_pythonic"),
        ('{"parameters": {}}: [func_name1(a=b)] <|header_start|>', "pythonic"),
        ("<|{{ message.role }}|>{{ message.content }}", None),
        ('Respond as {"name": name, "parameters": {}}.', None),
        ("<tool_call>\\n<function=name>", None),
        ("<tool_call>name<arg_key>", None),
        ("", None),
    ],
)
def test_the_template_says_which(template: str, name: str | None) -> None:
    assert detect(template) == (None if name is None else FAMILIES[name])


def accepts(rules: str, text: str) -> bool:
    grammar = f"start: answer\nTEXT: /(.|\\n)*/\n{rules}\n"
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(BACKEND.encode(text).ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("name", "call", "several"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>',
            "CALL\nCALL",
        ),
        ("mistral", '[TOOL_CALLS][{"name": "get", "arguments": {"a": 1}}]', ""),
        ("llama3_json", '{"name": "get", "parameters": {"a": 1}}', "CALL; CALL"),
        ("pythonic", "[get(a=1)]", "[get(a=1), get(a=1)]"),
    ],
)
def test_a_grammar_lets_its_own_calls_through(name: str, call: str, several: str) -> None:
    def rules(*, is_several: bool = False, is_required: bool = True) -> str:
        wanted = Wanted([GET], literal, is_several=is_several, is_required=is_required)
        return FAMILIES[name].grammar(wanted)

    two = several.replace("CALL", call)
    assert accepts(rules(), call) and not accepts(rules(), "I look.")
    assert not accepts(rules(), call.replace("get", "set"))
    assert not accepts(rules(), call.replace("1", '"b"'))
    if two:
        assert accepts(rules(is_several=True), two) and not accepts(rules(), two)
    assert accepts(rules(is_required=False), "I look.") and accepts(rules(is_required=False), call)
