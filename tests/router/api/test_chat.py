"""Chats: what is refused, how the messages become a prompt, and what a choice looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.api.chat import ChatAnswer, ChatBody
from router.api.completions.completion import Completion
from router.api.completions.deltas import Delta
from router.api.completions.response import Head
from router.api.errors import HttpError
from router.api.model import ServedModel
from router.api.requests.conversation import ToolChoice
from router.text.output_parts import CallArguments, CallStart, Part
from tests.router.api.asking import chatting, converse, letters, refusal
from tests.router.api.scripted import Core, Scene, Writer
from tests.router.site import TEMPLATE, events


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    return letters(tmp_path)


def test_only_a_message_that_goes_on_is_echoed(model: ServedModel) -> None:
    begun = [{"role": "assistant", "content": "I am"}]
    for fields, prefix in (
        ({"continue_final_message": True}, "I am"),
        ({"add_generation_prompt": False}, "I am"),
        ({}, ""),
    ):
        [(_, echo)] = converse(model, messages=begun, echo=True, **fields).requests
        assert echo == prefix


def test_template_variables_of_the_client(model: ServedModel) -> None:
    for taken in ("messages", "tools", "documents", "add_generation_prompt"):
        with pytest.raises(HttpError, match=f"must not set {taken}"):
            converse(model, chat_template_kwargs={taken: []})
    converse(model, chat_template_kwargs={"enable_thinking": False})


GET = {"type": "function", "function": {"name": "get"}}
PUT = {"type": "function", "function": {"name": "put"}}


@pytest.mark.parametrize(("wanted", "content"), [(GET, ""), ("required", ""), ("auto", None)])
def test_the_content_of_calls_alone(tmp_path: Path, wanted: Any, content: str | None) -> None:
    letters(tmp_path)
    template = json.dumps({"chat_template": "{{ tools | length if tools }}" + TEMPLATE})
    (tmp_path / "tokenizer_config.json").write_text(template)
    model = ServedModel("letters", tmp_path, tool_calls="hermes")
    asked = converse(model, tools=[GET], tool_choice=wanted)
    completion = Completion(Core(), asked, Writer())
    completion.submit()
    parts: list[Part] = [CallStart(0, "get"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}")]
    calls = Delta("", finish_reason="tool_calls", parts=parts)
    [said] = json.loads(asked.answer(completion, Head("1", 7, "m")).whole([calls]))["choices"]
    assert said["message"]["content"] == content
    [call] = said["message"]["tool_calls"]
    assert call.keys() == {"id", "type", "function"}, "a place is for those that come in pieces"
    assert call["function"] == {"name": "get", "arguments": '{"a": 1}'}


def allowing(**fields: Any) -> dict[str, Any]:
    allowed = {"mode": "auto", "tools": [GET]} | fields
    return {"type": "allowed_tools", "allowed_tools": allowed}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones_to_be_called(mode: Any) -> None:
    body = chatting(tools=[GET, PUT], tool_choice=allowing(mode=mode))
    assert [tool.name for tool in body.known_tools] == ["get", "put"], "the prompt is the same"
    assert body.choice_of_tool == ToolChoice(mode, ("get",))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            allowing(tools=[GET, PUT]),
            "tool_choice.allowed_tools.tools[1].function.name: 'put' is none of the tools: 'get'",
        ),
        (
            allowing(tools=[GET | {"type": "mcp"}]),
            "tool_choice.allowed_tools.tools[0].type: invalid value 'mcp': expected function",
        ),
        (
            allowing(mode="none"),
            "tool_choice.allowed_tools.mode: invalid enum value 'none': expected auto or required",
        ),
        (
            {"type": "custom"},
            "tool_choice.type: invalid value 'custom': expected function or allowed_tools",
        ),
        (allowing(tools=[]), "tool_choice.allowed_tools.tools: expected `array` of length >= 1"),
    ],
)
def test_a_choice_of_tools_is_refused_by_name(wanted: Any, said: str) -> None:
    assert refusal(ChatBody, tools=[GET], tool_choice=wanted).message == said


@pytest.mark.parametrize("wanted", ["auto", "required", GET, allowing()])
def test_tools_are_refused_for_a_model_whose_calls_nobody_can_read(
    model: ServedModel, wanted: Any
) -> None:
    with pytest.raises(HttpError, match="--tool-call-parser names none") as caught:
        converse(model, tools=[GET], tool_choice=wanted)
    assert (caught.value.status, caught.value.param) == (400, "tools")


@pytest.mark.parametrize("shows_reasoning", [True, False])
def test_reasoning_may_be_left_out(tmp_path: Path, shows_reasoning: bool) -> None:
    letters(tmp_path)
    model = ServedModel("letters", tmp_path, reasoning="qwen3")
    asked = converse(model, stream=False, include_reasoning=shows_reasoning)
    assert asked.shows_reasoning is shows_reasoning
    scene = Scene(ChatAnswer, reader=asked.reader, shows_reasoning=shows_reasoning)
    scene.say("<think>ab</think>c")
    scene.end("length")
    [said] = scene.body()["choices"]
    assert said["message"]["content"] == "c"
    assert said["message"].get("reasoning_content") == ("ab" if shows_reasoning else None)


def test_a_whole_chat() -> None:
    scene = Scene(ChatAnswer, prefix="<", has_logprobs=True, is_streamed=False)
    scene.say("ab")
    scene.end("length")
    body = scene.body()
    [said] = body["choices"]
    assert said["message"].pop("annotations") == []
    assert said["message"] == {"role": "assistant", "content": "<ab", "refusal": None}
    assert (said["index"], said["finish_reason"]) == (0, "length")
    assert len(said["logprobs"]["content"]) == 2
    assert body["prompt_logprobs"] is None


def test_the_chunks_of_a_chat() -> None:
    scene = Scene(ChatAnswer, prefix="<")
    scene.say("ab")
    taken = scene.answer.take()
    scene.end()
    chunks = events((taken + scene.answer.take() + scene.answer.end()).decode())
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "<a"},
        {"content": "b"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]


def test_how_many_log_probabilities_a_chat_has() -> None:
    for fields, number in (({}, 0), ({"top_logprobs": 3}, 3), ({"logprobs": False}, None)):
        assert chatting(**{"logprobs": True} | fields).num_logprobs == number
