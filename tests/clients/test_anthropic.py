"""The anthropic package on /v1/messages: text, system, tools, streams, counts, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.questions import (
    MESSAGES,
    PERSON,
    STORY,
    TOOLS,
    Person,
    Time,
    check_call,
)
from tests.cluster import Cluster

OURS: Any = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]
GREEDY: Any = {"extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=cluster.http,
        api_key="none",
        max_retries=0,
        http_client=anthropic.DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


def ask(client: anthropic.Anthropic, cluster: Cluster, **fields: Any) -> Any:
    asked = {"messages": MESSAGES, "max_tokens": 400} | fields
    return client.messages.create(model=cluster.model, **asked)


def text_of(message: Any) -> str:
    return "".join([block.text for block in message.content if block.type == "text"])


def test_a_message(client: anthropic.Anthropic, cluster: Cluster) -> None:
    message = ask(client, cluster, **GREEDY)
    assert (message.type, message.role, message.model) == ("message", "assistant", cluster.model)
    assert message.id.startswith("msg_")
    assert text_of(message)
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.stop_sequence is None
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0


def _read(usage: Any) -> int:
    """Every token of the prompt: those of the cache are counted apart."""
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return int(usage.input_tokens) + cached


def test_limits_and_stop_sequences(client: anthropic.Anthropic, cluster: Cluster) -> None:
    asked: Any = {"messages": [{"role": "user", "content": STORY}], **GREEDY}
    short = ask(client, cluster, max_tokens=3, **asked)
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 3
    text = text_of(ask(client, cluster, max_tokens=60, **asked))
    stop = text[10:16]
    stopped = ask(client, cluster, max_tokens=60, stop_sequences=["\u0001", stop], **asked)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped) == text[: text.index(stop)]


def test_events_make_the_whole_message(client: anthropic.Anthropic, cluster: Cluster) -> None:
    whole = ask(client, cluster, **GREEDY)
    events = list(ask(client, cluster, stream=True, **GREEDY))
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) <= {"content_block_delta"}
    assert events[0].message.content == [] and events[0].message.stop_reason is None
    with client.messages.stream(
        model=cluster.model, messages=MESSAGES, max_tokens=400, **GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == text_of(last) == text_of(whole)
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("kind", ["any", "tool"])
def test_a_forced_tool(client: anthropic.Anthropic, cluster: Cluster, kind: str) -> None:
    choice: Any = {"type": kind, "disable_parallel_tool_use": True}
    if kind == "tool":
        choice["name"] = "get_weather"
    asked: Any = {"tools": OURS, "tool_choice": choice, "extra_body": {"seed": 3}}
    message = ask(client, cluster, **asked)
    assert message.stop_reason == "tool_use"
    (call,) = [block for block in message.content if block.type == "tool_use"]
    check_call(call.name, call.input)
    with client.messages.stream(
        model=cluster.model, messages=MESSAGES, max_tokens=400, **asked
    ) as stream:
        streamed = stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
        block.model_dump(exclude={"id"}) for block in message.content
    ]


def test_the_result_of_a_tool_goes_back(client: anthropic.Anthropic, cluster: Cluster) -> None:
    message = ask(client, cluster, tools=OURS, tool_choice={"type": "any"})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "21 degrees"}
        for block in message.content
        if block.type == "tool_use"
    ]
    turns: Any = [
        *MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    following = ask(client, cluster, messages=turns, tools=OURS)
    assert _read(following.usage) > _read(message.usage)


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_call_that_a_stop_cuts_goes_back(
    client: anthropic.Anthropic, cluster: Cluster, is_eager: bool
) -> None:
    asked: Any = {
        "tools": [OURS[0] | {"eager_input_streaming": is_eager}],
        "tool_choice": {"type": "any"},
        "stop_sequences": ['"unit": "'],
    }
    with client.messages.stream(
        model=cluster.model, messages=MESSAGES, max_tokens=400, **asked
    ) as stream:
        message = stream.get_final_message()
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", '"unit": "')
    assert message.content[-1].type == "tool_use"
    turns: Any = [*MESSAGES, {"role": "assistant", "content": message.content}, *MESSAGES]
    assert ask(client, cluster, messages=turns, tools=OURS, max_tokens=1).stop_reason


def test_structured_output(client: anthropic.Anthropic, cluster: Cluster) -> None:
    wanted: Any = {"format": {"type": "json_schema", "schema": PERSON}}
    Person.model_validate_json(text_of(ask(client, cluster, output_config=wanted)))
    # What it makes of a class has no ranges and no lengths, so one without them is asked for.
    parsed = client.messages.parse(
        model=cluster.model, messages=MESSAGES, max_tokens=400, output_format=Time
    )
    assert isinstance(parsed.parsed_output, Time)


def test_count_tokens_counts_what_would_be_read(
    client: anthropic.Anthropic, cluster: Cluster
) -> None:
    for fields in ({}, {"system": "Be brief."}, {"tools": OURS}):
        asked: Any = {"model": cluster.model, "messages": MESSAGES, **fields}
        counted = client.messages.count_tokens(**asked).input_tokens
        assert counted == _read(client.messages.create(**asked, max_tokens=1).usage)


def test_errors_have_anthropic_s_shape(client: anthropic.Anthropic, cluster: Cluster) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(client, cluster, max_tokens=0)
    assert bad.value.body["type"] == "error"  # type: ignore[index]
    assert bad.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert "max_tokens" in bad.value.body["error"]["message"]  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude-none", messages=MESSAGES, max_tokens=5)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        ask(client, cluster, tools=OURS, tool_choice={"type": "tool", "name": "no_such_tool"})


def test_answers_and_errors_have_the_id_of_their_request(
    client: anthropic.Anthropic, cluster: Cluster
) -> None:
    named: Any = {"extra_headers": {"x-request-id": "req-7"}}
    answer = client.messages.with_raw_response.create(
        model=cluster.model, messages=MESSAGES, max_tokens=1, **named
    )
    assert (answer.headers["request-id"], answer.parse().id) == ("req-7", "msg_req-7")
    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(client, cluster, max_tokens=-1, **named)
    assert bad.value.request_id == "req-7"
