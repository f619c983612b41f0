"""Items: what is refused, the messages they become, and the JSON they are kept as."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from router.api.errors import HttpError
from router.api.responses.items import Item, encode_items, messages_of

USER: dict[str, Any] = {"role": "user", "content": "What is the weather in Oslo?"}
REASONING: dict[str, Any] = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Ask."}],
}
MESSAGE: dict[str, Any] = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
}
CALL: dict[str, Any] = {
    "type": "function_call",
    "call_id": "c1",
    "name": "weather",
    "arguments": '{"city": "Oslo"}',
}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "rain"}


def items(*documents: dict[str, Any]) -> list[Item]:
    return msgspec.convert(list(documents), list[Item])


def refusal(**fields: Any) -> str:
    [item] = items(fields)
    with pytest.raises(HttpError) as caught:
        item.check("input[3]")
    assert caught.value.param is not None
    assert caught.value.param.startswith("input[3]")
    return caught.value.message


def called(*names: str) -> list[dict[str, Any]]:
    function = {"name": CALL["name"], "arguments": CALL["arguments"]}
    return [{"id": name, "type": "function", "function": function} for name in names]


def test_a_call_that_was_cut_is_kept_but_in_no_message() -> None:
    cut = CALL | {"call_id": "c2", "arguments": '{"ci', "status": "incomplete"}
    whole, half = json.loads(encode_items(items(CALL, cut), "k"))
    assert (whole["status"], half["status"]) == ("completed", "incomplete")
    assert messages_of(items(CALL, cut), None) == messages_of(items(CALL), None)


def test_what_was_said_is_output_and_what_was_asked_is_input() -> None:
    kept = json.loads(encode_items(items(USER, MESSAGE), "k"))
    parts = [(item["role"], item["content"][0]["type"]) for item in kept]
    assert parts == [("user", "input_text"), ("assistant", "output_text")]


def test_a_turn_of_the_assistant_is_one_message() -> None:
    said = messages_of(
        items(USER, REASONING, MESSAGE, CALL, CALL | {"call_id": "c2"}, OUTPUT), "Be"
    )
    assert said == [
        {"role": "system", "content": "Be"},
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Ask.",
            "tool_calls": called("c1", "c2"),
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]


def test_a_turn_may_lack_any_of_them() -> None:
    assert messages_of(items(CALL), None) == [
        {"role": "assistant", "content": None, "tool_calls": called("c1")}
    ]
    assert messages_of(items(REASONING, CALL), None) == [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Ask.",
            "tool_calls": called("c1"),
        }
    ]


def test_what_cannot_be_in_one_turn_is_in_two() -> None:
    for pair in ([MESSAGE, MESSAGE], [MESSAGE, REASONING], [CALL, MESSAGE], [REASONING, REASONING]):
        assert len(messages_of(items(*pair), None)) == 2
    assert len(messages_of(items(CALL, OUTPUT, CALL), None)) == 3


def test_parts_of_text_are_lines() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    [message] = messages_of(items({"role": "developer", "content": parts}), None)
    assert message == {"role": "developer", "content": "a\nb"}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages_of(items(refused), None)[0]["content"] == "No."


def test_reasoning_may_be_a_summary() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short."}]}
    assert messages_of(items(summary), None)[0]["reasoning_content"] == "In short."


def test_what_is_kept_reads_as_what_was_sent() -> None:
    sent = items(USER, REASONING, MESSAGE, CALL, OUTPUT)
    kept = encode_items(sent, "k")
    names = [item["id"] for item in json.loads(kept)]
    assert names == ["msg_ki000", "rs_1", "msg_1", "fc_ki003", "fco_ki004"]
    again = msgspec.json.decode(kept, type=list[Item])
    assert messages_of(again, None) == messages_of(sent, None)
    assert encode_items(again, "other") == kept


def test_refusals_name_the_field() -> None:
    assert "computer_call" in refusal(type="computer_call")
    assert "role" in refusal(role="tool", content="x")
    assert "content: is missing" in refusal(role="user")
    assert "call_id: is missing" in refusal(type="function_call", name="a", arguments="{}")
    assert "output: is missing" in refusal(type="function_call_output", call_id="c")
    picture = {"type": "input_image", "image_url": "data:"}
    assert "content[0].type: 'input_image'" in refusal(role="user", content=[picture])
    assert "text: is missing" in refusal(role="user", content=[{"type": "input_text"}])
    assert "encrypted_content" in refusal(type="reasoning", encrypted_content="gAAA")
    assert len(refusal(type="x" * 10_000)) < 400
