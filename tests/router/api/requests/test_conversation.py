"""Messages of a conversation, and its tools: what is taken, and what is refused by which name."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import convert

from router.api.errors import HttpError
from router.api.requests.conversation import (
    Tool,
    ToolChoice,
    check_tools,
    flat_messages,
    new_call_id,
)
from router.api.responses.items import Item, Part, messages_of


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert flat_messages([{"role": "user", "content": parts, "name": "x"}]) == [
        {"role": "user", "content": "a\nb", "name": "x"}
    ]
    for message in (
        {"role": "my-own_role7", "content": "x"},
        {"role": "assistant", "content": None},
    ):
        assert flat_messages([message]) == [message]


def test_a_refusal_of_the_assistant_is_what_it_said() -> None:
    """As the same part is in the items of /v1/responses."""
    parts = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]
    [message] = flat_messages([{"role": "assistant", "content": parts}])
    [of_items] = messages_of([Item(role="assistant", content=convert(parts, list[Part]))], None)
    assert message == of_items == {"role": "assistant", "content": "Well.\nNo."}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "", "content": "x"}, "messages[0].role"),
        ({"role": "user|>", "content": "x"}, "messages[0].role"),
        ({"role": "user\n", "content": "x"}, "messages[0].role"),
        ({"role": "x" * 65, "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": None}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_a_bad_message_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        flat_messages([message])
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (ToolChoice("named", ("x",)), "tool_choice: 'x' is none of the tools: 'a', 'b'"),
        (ToolChoice("auto", ("a", "x")), "allowed[1]: 'x' is none of the tools: 'a', 'b'"),
    ],
)
def test_who_names_what_is_no_tool_is_told_the_tools(choice: ToolChoice, said: str) -> None:
    with pytest.raises(HttpError) as caught:
        check_tools([Tool("a"), Tool("b")], choice, "allowed[{}]")
    assert caught.value.message == said


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("auto", ("a",))])
def test_a_choice_of_tools_needs_some(choice: ToolChoice) -> None:
    check_tools([Tool("a")], choice)
    with pytest.raises(HttpError, match="there are none") as caught:
        check_tools([], choice)
    assert caught.value.param == "tool_choice"


def test_ids_of_calls_are_nine_letters_and_digits_and_never_the_same() -> None:
    call_ids = [new_call_id() for _ in range(100)]
    assert len(set(call_ids)) == 100
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in call_ids)
    assert {*"".join(call_ids)} & {*"0123456789"}
