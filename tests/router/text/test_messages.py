"""Messages of the API become what templates read."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from router.text.messages import for_template
from wire.errors import ErrorCode, WireError


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "get", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_are_an_object(arguments: Any) -> None:
    message = call(arguments)
    [wanted] = for_template([message], "")
    assert wanted["tool_calls"][0] == {
        "id": "1",
        "function": {"name": "get", "arguments": {"a": 1}},
    }
    assert message == call(arguments)


def test_no_arguments_are_an_empty_object() -> None:
    with capture_logs() as logs:
        [wanted] = for_template([call(" ")], "")
    assert logs == []
    assert wanted["tool_calls"][0]["function"]["arguments"] == {}


BROKEN = ("[1]", "{", '{"a": "x\ny"}', '{"a": 1,}', r'{"a": "\d"}', '{"a": NaN}')


@pytest.mark.parametrize("arguments", [*BROKEN, "[" * 100_000, r'{"\ud800": 1}', '{"a": 1e999}'])
def test_a_text_of_no_object_is_an_empty_one_and_the_log_says_so_once(arguments: str) -> None:
    message = call(arguments)
    with capture_logs() as logs:
        [_, *wanted] = for_template([{"role": "user", "content": "x"}, message, message], "")
    for each in wanted:
        assert each["tool_calls"][0]["function"]["arguments"] == {}
    assert message == call(arguments)
    [said] = logs
    first = "messages[1].tool_calls[0].function.arguments"
    assert (said["log_level"], said["calls"], said["first"]) == ("warning", 2, first)
    assert set(said) == {"event", "log_level", "calls", "first"}, "no text of a conversation"


@pytest.mark.parametrize("arguments", [None, 3, [1]])
def test_what_is_neither_text_nor_object_is_named(arguments: Any) -> None:
    with pytest.raises(WireError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arg") as caught:
        for_template([{"role": "user", "content": "x"}, call(arguments)], "")
    assert caught.value.code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("calls", [3, [3], [{}], [{"function": {}}], [{"function": {"name": 3}}]])
def test_what_is_no_call_is_named(calls: Any) -> None:
    with pytest.raises(WireError, match=r"messages\[0\]\.tool_calls"):
        for_template([{"role": "assistant", "tool_calls": calls}], "")


def test_no_calls_are_no_field() -> None:
    assert "tool_calls" not in for_template([{"role": "assistant", "tool_calls": []}], "")[0]


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ message.content }}", ""),
        ("{% if message['content'] is none %}", None),
        ("{% if message.content is not none %}", None),
    ],
)
def test_no_content(template: str, content: str | None) -> None:
    for message in ({"role": "assistant"}, {"role": "assistant", "content": None}):
        assert for_template([message], template)[0].get("content") == content


def test_the_developer_is_the_system_where_the_template_has_no_place_for_them() -> None:
    message = {"role": "developer", "content": "x"}
    assert for_template([message], "{{ messages }}")[0]["role"] == "system"
    assert for_template([message], "{% if role == 'developer' %}")[0]["role"] == "developer"
