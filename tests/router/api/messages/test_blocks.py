"""Messages of Anthropic's API as messages of a chat."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from router.api.errors import HttpError
from router.api.messages.blocks import Chat, Message

Role = Literal["user", "assistant", "system"]


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def use(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, content: Any = "", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def chat(*turns: tuple[Role, Any]) -> list[dict[str, Any]]:
    subject = Chat()
    for index, (role, content) in enumerate(turns):
        subject.add(Message(role, content), f"messages[{index}]")
    return subject.messages


def refusal(*turns: tuple[Role, Any]) -> str:
    with pytest.raises(HttpError) as caught:
        chat(*turns)
    assert caught.value.status == 400
    return caught.value.message


def test_a_content_is_a_string_or_lines_of_text() -> None:
    assert chat(("user", "hi"), ("assistant", [text("a"), text("b")]), ("user", [text("c")])) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a\nb"},
        {"role": "user", "content": "c"},
    ]


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    assert chat(("user", "a"), ("user", [text("b")]), ("system", "s"), ("system", "t")) == [
        {"role": "user", "content": "a\nb"},
        {"role": "system", "content": "s\nt"},
    ]


def test_thoughts_are_kept_apart() -> None:
    thoughts = [{"type": "thinking", "thinking": each, "signature": "x"} for each in "ab"]
    assert chat(("assistant", [*thoughts, text("so")])) == [
        {"role": "assistant", "content": "so", "reasoning_content": "a\nb"}
    ]


def test_calls_and_their_results() -> None:
    messages = chat(
        ("user", "weather?"),
        ("assistant", [text("let me see"), use("toolu_a", "get", city="Rome"), use("b/2", "now")]),
        ("user", [result("b/2", [text("noon"), text("sharp")]), result("toolu_a"), text("well?")]),
    )
    calls = [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "get", "arguments": {"city": "Rome"}},
        },
        {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": {}}},
    ]
    assert messages == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "let me see", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call00001", "name": "now", "content": "noon\nsharp"},
        {"role": "tool", "tool_call_id": "call00000", "name": "get", "content": ""},
        {"role": "user", "content": "well?"},
    ]


def test_a_result_that_is_an_error_says_so() -> None:
    messages = chat(
        ("assistant", [use("a", "get")]), ("user", [result("a", "no such city", is_error=True)])
    )
    assert messages[0]["content"] == ""
    assert messages[1]["content"] == "Error: no such city"


def test_what_says_something_to_others_only_is_taken() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    call = use("a", "get") | cached | {"caller": {"type": "direct"}, "toolset_name": None}
    assert chat(
        ("user", [text("hi") | cached | {"citations": None}]),
        ("assistant", [call]),
        ("user", [result("a") | cached]),
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "image", "source": {}}], "content[0].type: 'image' is not supported here"),
        ([text("a"), {"type": "document"}], "content[1].type: 'document' is not supported here"),
        ([{"text": "a"}], "content[0].type: 'None' is not supported here, only text, tool_result"),
        ([{"type": ["text"]}], "content[0].type: \"['text']\" is not supported here"),
        ([use("a", "get")], "content[0].type: 'tool_use' is not supported here"),
        ([{"type": "text", "text": 5}], "content[0].text: expected `str`, got `int`"),
        ([{"type": "text"}], "content[0].text: object missing required field `text`"),
        ([text("a") | {"colour": 1}], "content[0]: object contains unknown field `colour`"),
        (
            [text("a") | {"citations": [{}]}],
            "content[0].citations: expected `array` of length <= 0",
        ),
        (["a"], "content[0]: expected an object"),
        ([result("a")], "content[0].tool_use_id: 'a' is the id of no tool_use block before it"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(content: Any, said: str) -> None:
    assert refusal(("user", content)).startswith(f"messages[0].{said}")


def test_a_picture_in_a_result_is_refused() -> None:
    turns: tuple[tuple[Role, Any], ...] = (
        ("assistant", [use("a", "get")]),
        ("user", [result("a", [{"type": "image"}])]),
    )
    said = "messages[1].content[0].content[0].type: 'image' is not supported here, only text"
    assert refusal(*turns) == said
