"""Bodies of /v1/messages, and what is asked of the core."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import (
    MessageCountTokensParams,
    TextBlockParam,
    ThinkingBlockParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from msgspec import structs

from router.api.completions.completion import CompletionRequest
from router.api.errors import HttpError
from router.api.messages.blocks import Text, Thinking, ToolResult, ToolUse
from router.api.messages.body import ClientTool, MessagesBody, PromptBody, count_tokens, read
from router.api.model import ServedModel
from router.api.requests.body import parse
from router.api.requests.conversation import Conversation, Tool, ToolChoice
from tests.router.api.asking import CONTEXT, letters, raw
from tests.router.site import TEMPLATE, ids
from wire.options import Structure

USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
BARE = {"model": "letters", "messages": USER, "max_tokens": 9}
RENDERED = "<s>user:hi\nassistant:"


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    return letters(tmp_path)


def body(**fields: Any) -> MessagesBody:
    return parse(MessagesBody, raw(**BARE | fields))


def conversation(model: ServedModel, /, **fields: Any) -> Conversation:
    return body(**fields).conversation(model)


def refusal(model: ServedModel, /, **fields: Any) -> str:
    with pytest.raises(HttpError) as caught:
        conversation(model, **fields)
    assert caught.value.status == 400
    return caught.value.message


def ask(model: ServedModel, /, **fields: Any) -> CompletionRequest:
    return read(model, raw(**BARE | fields), CONTEXT)


def test_a_body_becomes_a_request(model: ServedModel) -> None:
    asked = ask(
        model,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=5,
        stream=True,
        stop_sequences=["x"],
        metadata={"user_id": "u"},
        service_tier="auto",
        diagnostics={"previous_message_id": None},
        cache_control={"type": "ephemeral"},
        speed="standard",
        container=None,
        inference_geo=None,
        mcp_servers=[],
        context_management={"edits": []},
        output_config={},
    )
    ((request, echo),) = asked.requests
    assert (list(request.token_ids), echo) == ([0, *ids(RENDERED.removeprefix("<s>"))], "")
    options = request.options
    assert (options.temperature, options.top_p, options.top_k) == (0.5, 0.9, 3)
    assert (options.seed, options.max_tokens, request.max_new_tokens) == (5, 9, 8)
    assert asked.is_streamed and asked.stops is not None and asked.num_choices == 1


def test_no_more_tokens_are_asked_for_than_there_is_room_for(model: ServedModel) -> None:
    ((request, _),) = ask(model, max_tokens=32_000).requests
    room = CONTEXT.max_model_len - len(request.token_ids)
    assert (request.options.max_tokens, request.max_new_tokens) == (room, room - 1)


def test_an_answer_is_held_to_a_schema(model: ServedModel) -> None:
    def formed(schema: Any) -> CompletionRequest:
        asked = ask(model, output_config={"format": {"type": "json_schema", "schema": schema}})
        assert asked.wanted is not None
        return asked.constrained_to(asked.wanted.to_structure())

    ((request, _),) = formed({"type": "object"}).requests
    assert request.options.structure == Structure("json_schema", '{"type": "object"}')
    for schema in (5, {"type": "nothing"}):
        with pytest.raises(HttpError, match=r"^output_config\.format\.schema: "):
            formed(schema)


def test_a_system_prompt_comes_first(model: ServedModel) -> None:
    blocks = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    for system, said in (("be brief", "be brief"), (blocks, "be\nbrief")):
        assert conversation(model, system=system).messages == [
            {"role": "system", "content": said},
            *USER,
        ]
    assert conversation(model, system="").messages == USER


def test_the_last_message_may_be_the_beginning_of_the_answer(model: ServedModel) -> None:
    begun = [*USER, {"role": "assistant", "content": "The answer is ("}]
    subject = conversation(model, messages=begun)
    assert subject.continue_final_message and not subject.add_generation_prompt
    assert model.render(subject).endswith("assistant:The answer is (")
    assert model.render(conversation(model)).endswith("hi\nassistant:")
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    for before in ([], [{"type": "text", "text": "Let me see."}]):
        said = refusal(model, messages=[*USER, {"role": "assistant", "content": [*before, call]}])
        assert said == "messages: the last ends with a tool_use block; send its tool_result"


def test_tools(model: ServedModel) -> None:
    tools = [WEATHER, WEATHER | {"name": "now", "type": "custom", "strict": True}]
    subject = conversation(model, tools=tools)
    schema = WEATHER["input_schema"]
    assert subject.tools == [
        Tool("weather", "Of a city.", schema),  # type: ignore[arg-type]
        Tool("now", "Of a city.", schema, True),  # type: ignore[arg-type]
    ]
    assert subject.has_parallel_calls


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "weather"}, ToolChoice("named", ("weather",))),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_which_tools_are_to_be_called(
    model: ServedModel, choice: dict[str, Any], mode: ToolChoice
) -> None:
    assert conversation(model, tools=[WEATHER], tool_choice=choice).tool_choice == mode
    for is_single in (True, False):
        how = choice | {"disable_parallel_tool_use": is_single}
        subject = conversation(model, tools=[WEATHER], tool_choice=how)
        assert subject.has_parallel_calls is not is_single


def thinker(path: Path, template: str) -> ServedModel:
    letters(path)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return ServedModel("letters", path)


def test_templates_are_told_whether_to_think(model: ServedModel, tmp_path: Path) -> None:
    told = {"type": "enabled", "budget_tokens": 2000}
    adaptive, disabled = {"type": "adaptive"}, {"type": "disabled"}
    assert conversation(model).variables == conversation(model, thinking=disabled).variables == {}
    assert set(conversation(model, thinking=adaptive).variables.values()) == {True}
    assert refusal(model, thinking=told).startswith("thinking: this model does not think")

    switched = thinker(tmp_path, "{% if enable_thinking %}<think></think>{% endif %}" + TEMPLATE)
    assert conversation(switched, thinking=told).variables["enable_thinking"] is True
    assert conversation(switched, thinking=disabled).variables == {"enable_thinking": False}
    assert ask(switched, thinking=told).reader is not None

    always = thinker(tmp_path, "<think></think>" + TEMPLATE)
    assert refusal(always, thinking=disabled) == "thinking: this model always thinks; leave it out"


def test_templates_are_told_how_much_effort_to_make(model: ServedModel, tmp_path: Path) -> None:
    assert conversation(model, output_config={"effort": "low"}).variables == {}
    silent = thinker(tmp_path, "<think></think>" + TEMPLATE)
    assert conversation(silent, output_config={"effort": "high"}).variables == {}
    said = refusal(silent, output_config={"effort": "low"})
    assert said == "output_config.effort: this model takes none but high; leave it out"
    telling = thinker(tmp_path, "{{ reasoning_effort }}" + TEMPLATE)
    variables = conversation(telling, output_config={"effort": "low"}).variables
    assert variables == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 2}, "object contains unknown field `n`"),
        ({"max_tokens": 0}, "max_tokens: expected `int` >= 1"),
        ({"stop_sequences": [""]}, "stop_sequences[0]: expected `str` of length >= 1"),
        ({"temperature": 3}, "temperature: expected `float` <= 2.0"),
        ({"messages": []}, "messages: expected `array` of length >= 1"),
        ({"messages": [*USER, USER]}, "messages[1]: expected `object`, got `array`"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role: invalid enum value"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: expected `array`"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: expected `str | ar"),
        ({"container": "x"}, "container: expected `null`"),
        ({"inference_geo": "eu"}, "inference_geo: expected `null`"),
        ({"speed": "fast"}, "speed: invalid enum value 'fast'"),
        ({"service_tier": "gold"}, "service_tier: invalid enum value 'gold'"),
        ({"mcp_servers": [{}]}, "mcp_servers: expected `array` of length <= 0"),
        ({"context_management": {"edits": [{}]}}, "context_management.edits: expected `array`"),
        ({"output_config": {"effort": "no"}}, "output_config.effort: invalid enum value 'no'"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config.format.type: invalid"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: invalid enum value"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display: invalid"),
        ({"system": [{"type": "image"}]}, "system[0].type: 'image' is not supported here"),
        ({"tools": [5]}, "tools[0]: expected an object"),
        ({"tools": [{"type": "web_search_20250305"}]}, "tools[0].type: 'web_search_20250305' is"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: object missing required field"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name: expected `str` matching"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading: there is no"),
        ({"tools": [WEATHER | {"input_examples": [{}]}]}, "tools[0].input_examples: expected"),
        (
            {"tools": [WEATHER | {"allowed_callers": ["x"]}]},
            "tools[0].allowed_callers[0]: invalid enum value 'x': expected direct",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]: there are two tools named weather"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: is for requests with tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice: 'x' is none of the tools: 'weather'",
        ),
    ],
)
def test_what_would_change_the_answer_and_is_not_here_is_refused(
    model: ServedModel, fields: dict[str, Any], said: str
) -> None:
    assert refusal(model, **fields).startswith(said)


def test_every_field_of_the_official_client_has_an_answer() -> None:
    headers = {"user_profile_id", "workspace_id"}
    assert set(MessageCreateParamsStreaming.__annotations__) - headers <= _fields(MessagesBody)
    assert set(MessageCountTokensParams.__annotations__) - headers <= _fields(PromptBody)
    assert set(ToolParam.__annotations__) <= _fields(ClientTool) | {"type"}
    for ours, official in (
        (Text, TextBlockParam),
        (Thinking, ThinkingBlockParam),
        (ToolUse, ToolUseBlockParam),
        (ToolResult, ToolResultBlockParam),
    ):
        assert set(official.__annotations__) <= _fields(ours) | {"type"}


def test_the_readme_has_every_field() -> None:
    readme = (Path(__file__).parents[4] / "router" / "README.md").read_text()
    table = readme.partition("### Messages")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert set(re.findall("`(.*?)`", "".join(rows))) == _fields(MessagesBody)


def _fields(kind: type[Any]) -> set[str]:
    return {field.name for field in structs.fields(kind)}


@pytest.mark.parametrize("lacking", BARE)
def test_what_is_required_is_named(lacking: str) -> None:
    fields = {name: value for name, value in BARE.items() if name != lacking}
    with pytest.raises(HttpError, match=f"^{lacking}: object missing required field"):
        parse(MessagesBody, raw(**fields))


def test_tokens_are_counted_as_they_would_be_read(model: ServedModel) -> None:
    fields = {"model": "letters", "messages": USER, "system": "s"}
    counted = json.loads(count_tokens(model, raw(**fields)))
    ((request, _),) = ask(model, system="s").requests
    assert counted == {"input_tokens": len(request.token_ids)}
    with pytest.raises(HttpError, match="unknown field `max_tokens`"):
        parse(PromptBody, raw(**fields, max_tokens=5))
