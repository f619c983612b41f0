"""The body of /v1/responses: what is refused by which name, and the conversation it asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.api.errors import HttpError
from router.api.requests.conversation import Tool, ToolChoice
from router.api.requests.structures import Wanted
from router.api.responses.body import INCLUDES, LOGPROBS
from tests.router.api.asking import letters
from tests.router.api.responses.asking import CLOCK, WEATHER, asked

SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "integer"}}
ALLOWED: dict[str, Any] = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "clock"}],
}


def refusal(**fields: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("input", {"input": []}),
        ("input[0].type", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        (
            "input[1].content[0].type",
            {
                "input": [
                    {"role": "user", "content": "a"},
                    {"role": "user"} | {"content": [{"type": "input_file"}]},
                ]
            },
        ),
        ("include", {"include": ["everything"]}),
        ("include", {"include": [LOGPROBS], "tools": [WEATHER]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("stream_options", {"stream_options": {}}),
        (
            "stream_options.include_obfuscation",
            {"stream": True, "stream_options": {"include_obfuscation": True}},
        ),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("text.format.type", {"text": {"format": {"type": "xml"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
        ("text.format.schema", {"text": {"format": SCHEMA | {"schema": 5}}}),
        ("text.format.name", {"text": {"format": {"type": "json_schema", "schema": {}}}}),
        ("reasoning.effort", {"reasoning": {"effort": "huge"}}),
        ("reasoning.summary", {"reasoning": {"summary": "detailed"}}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[1].name", {"tools": [WEATHER, {"type": "function"}]}),
        ("tools[1]", {"tools": [WEATHER, WEATHER]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "weather", "tools": [WEATHER]}),
        ("tool_choice", {"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}),
        ("tool_choice.type", {"tool_choice": {"type": "web_search"}, "tools": [WEATHER]}),
        ("tool_choice.tools[0].name", {"tool_choice": ALLOWED, "tools": [WEATHER]}),
        ("tool_choice.mode", {"tool_choice": {"type": "allowed_tools"}, "tools": [WEATHER]}),
        ("tool_choice.tools", {"tool_choice": ALLOWED | {"tools": []}, "tools": [WEATHER]}),
        (
            "tool_choice.tools[0].type",
            {"tool_choice": ALLOWED | {"tools": [{"type": "mcp"}]}, "tools": [WEATHER]},
        ),
        ("metadata[...]", {"metadata": {"a": "x" * 600}}),
    ],
)
def test_refusals_name_the_field(param: str, fields: dict[str, Any]) -> None:
    assert refusal(**fields).param == param


def test_what_asks_for_nothing_is_taken() -> None:
    asked(
        include=[name for name in INCLUDES if name != LOGPROBS],
        reasoning={"effort": None, "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "medium"},
    )


def test_the_conversation(tmp_path: Path) -> None:
    body = asked(
        instructions="Be brief.",
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "name": "clock"},
        parallel_tool_calls=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    conversation = body.conversation(body.items, letters(tmp_path))
    assert [message["content"] for message in conversation.messages] == ["Be brief.", "hi"]
    assert conversation.tools == [
        Tool("weather", "Of a city.", WEATHER["parameters"], is_strict=True),
        Tool("clock"),
    ]
    assert conversation.tool_choice == ToolChoice("named", ("clock",))
    assert not conversation.has_parallel_calls
    assert conversation.variables == {"enable_thinking": False}


def test_allowed_tools_are_the_only_ones_to_be_called(tmp_path: Path) -> None:
    body = asked(tools=[WEATHER, CLOCK], tool_choice=ALLOWED)
    conversation = body.conversation(body.items, letters(tmp_path))
    assert [tool.name for tool in conversation.visible_tools] == ["weather", "clock"]
    assert [tool.name for tool in conversation.callable_tools] == ["clock"]
    assert conversation.tool_choice == ToolChoice("required", ("clock",))


def test_what_the_text_is_to_be() -> None:
    assert asked().wanted is None
    assert asked(text={"format": {"type": "text"}}).wanted is None
    wanted = asked(text={"format": SCHEMA}).wanted
    assert wanted is not None
    assert (wanted.param, json.loads(wanted.text)) == ("text.format.schema", SCHEMA["schema"])
    json_object = asked(text={"format": {"type": "json_object"}}).wanted
    assert json_object == Wanted("text.format", "json_schema", '{"type": "object"}')
    both = asked(text={"format": SCHEMA}, structured_outputs={"regex": "a"})
    with pytest.raises(HttpError, match="one structure"):
        assert both.wanted


def test_the_echo_says_what_was_asked() -> None:
    fields = {
        "metadata": {"a": "b"},
        "user": "u",
        "text": {"format": SCHEMA},
        "tool_choice": ALLOWED,
    }
    body = asked(tools=[WEATHER, CLOCK], previous_response_id="resp_1", **fields)
    echo = {name: json.loads(bytes(value)) for name, value in body.echo().items()}
    assert echo["text"] == {"format": SCHEMA}
    assert (echo["metadata"], echo["user"]) == ({"a": "b"}, "u")
    assert echo["tools"][0] == WEATHER
    assert echo["tool_choice"] == ALLOWED
    assert (echo["previous_response_id"], echo["store"]) == ("resp_1", True)
