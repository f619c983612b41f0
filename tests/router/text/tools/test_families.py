"""Which family a chat template speaks, and which calls the grammar of each lets through."""

from __future__ import annotations

import pytest

from router.text.tools.families import FAMILIES, detect


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
