"""The openai package: texts, tools, structured output and responses, whole and streamed."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import openai
import pytest

from tests.clients.questions import (
    ALLOWED,
    MESSAGES,
    NAMED,
    PERSON,
    QUESTION,
    STORY,
    TOOLS,
    Person,
    Weather,
    check_call,
)
from tests.cluster import Cluster

# As /v1/responses takes them: without the inner object.
FLAT: Any = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
GREEDY: Any = {"temperature": 0, "max_tokens": 40}


def chat(client: openai.OpenAI, cluster: Cluster, **fields: Any) -> Any:
    limit = {} if "max_tokens" in fields else {"max_completion_tokens": 400}
    body: dict[str, Any] = {"messages": MESSAGES, **limit, **fields}
    return client.chat.completions.create(model=cluster.model, **body)


def respond(client: openai.OpenAI, cluster: Cluster, **fields: Any) -> Any:
    asked: dict[str, Any] = {"input": QUESTION, "max_output_tokens": 400} | fields
    return client.responses.create(model=cluster.model, **asked)


# Texts.


def test_streams_are_the_whole_answers(client: openai.OpenAI, cluster: Cluster) -> None:
    text: Any = {"model": cluster.model, "prompt": STORY, **GREEDY}
    whole = client.completions.create(**text)
    usage: Any = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    stream = client.completions.create(**text, stream=True)
    assert "".join([chunk.choices[0].text for chunk in stream]) == whole.choices[0].text != ""

    answer = chat(client, cluster, **GREEDY)
    *chunks, last = chat(
        client, cluster, **GREEDY, stream=True, stream_options={"include_usage": True}
    )
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join([c.delta.content or "" for c in choices]) == answer.choices[0].message.content
    assert choices[0].delta.role == answer.choices[0].message.role == "assistant"
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert reasons == [answer.choices[0].finish_reason]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert {chunk.usage for chunk in chunks} == {None} and last.choices == []
    assert last.usage.completion_tokens == answer.usage.completion_tokens


def test_stop_strings_across_token_borders(client: openai.OpenAI, cluster: Cluster) -> None:
    body: Any = {"model": cluster.model, "prompt": STORY, **GREEDY}
    text = client.completions.create(**body).choices[0].text
    for start in range(4, min(len(text) - 6, 40), 10):
        stop = text[start : start + 6]
        answer = client.completions.create(**body, stop=["\u0001never", stop])
        assert answer.choices[0].text == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        stream = client.completions.create(**body, stop=stop, stream=True)
        assert "".join([chunk.choices[0].text for chunk in stream]) == text[: text.index(stop)]


def test_errors_and_models(client: openai.OpenAI, cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, cluster, temperature=9, extra_headers={"x-request-id": "trace-me"})
    error = bad.value
    assert (error.param, error.code, error.type) == (
        *("temperature", "invalid_value", "invalid_request_error"),
    )
    assert error.request_id == "trace-me"
    with pytest.raises(openai.BadRequestError) as long:
        chat(client, cluster, max_completion_tokens=10_000_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-none", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    assert [model.id for model in client.models.list()] == [cluster.model]
    assert client.models.retrieve(cluster.model).owned_by == "baton"


# Chat: tools.


@pytest.mark.parametrize(
    "tool_choice", ["required", NAMED, ALLOWED], ids=["required", "named", "allowed"]
)
@pytest.mark.parametrize("seed", range(2))
def test_a_forced_call_has_valid_arguments(
    client: openai.OpenAI, cluster: Cluster, tool_choice: Any, seed: int
) -> None:
    answer = chat(
        client, cluster, tools=TOOLS, tool_choice=tool_choice, seed=seed, parallel_tool_calls=False
    )
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason in ("tool_calls", "stop")
    assert call.type == "function" and len(call.id) >= 9
    assert not choice.message.content
    if tool_choice != "required":
        assert call.function.name == "get_weather"
    check_call(call.function.name, json.loads(call.function.arguments))


@pytest.mark.parametrize("tool_choice", ["auto", "required", NAMED, ALLOWED, "none"])
def test_streamed_calls_are_the_whole_ones(
    client: openai.OpenAI, cluster: Cluster, tool_choice: Any
) -> None:
    asked: Any = {"tools": TOOLS, "tool_choice": tool_choice, "seed": 5}
    whole = chat(client, cluster, **asked)
    with client.chat.completions.stream(
        model=cluster.model, messages=MESSAGES, max_completion_tokens=400, **asked
    ) as stream:
        streamed = stream.get_final_completion()
    said, heard = whole.choices[0].message, streamed.choices[0].message
    assert (heard.content or "") == (said.content or "")
    assert [(it.function.name, it.function.arguments) for it in heard.tool_calls or ()] == [
        (it.function.name, it.function.arguments) for it in said.tool_calls or ()
    ]
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason


def test_chunks_of_a_call_name_it_once(client: openai.OpenAI, cluster: Cluster) -> None:
    chunks = list(chat(client, cluster, tools=TOOLS, tool_choice="required", stream=True))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    deltas = [delta for choice in choices for delta in choice.delta.tool_calls or ()]
    for index in {delta.index for delta in deltas}:
        first, *others = [delta for delta in deltas if delta.index == index]
        assert first.id and first.function.name and first.type == "function"
        assert not any(delta.id or delta.function.name for delta in others)
        pieces = [delta.function.arguments or "" for delta in (first, *others)]
        check_call(first.function.name, json.loads("".join(pieces)))
        assert len([piece for piece in pieces if piece]) > 1, "arguments come as they are generated"
    assert [choice.finish_reason for choice in choices if choice.finish_reason]


def test_the_result_of_a_call_goes_back(client: openai.OpenAI, cluster: Cluster) -> None:
    called = chat(client, cluster, tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False)
    message = called.choices[0].message
    result: Any = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": '{"degrees": 21}',
    }
    said = chat(client, cluster, messages=[*MESSAGES, message, result], tools=TOOLS)
    assert said.usage.prompt_tokens > called.usage.prompt_tokens


def test_parse_fills_a_model_from_a_call(client: openai.OpenAI, cluster: Cluster) -> None:
    answer = client.chat.completions.parse(
        model=cluster.model,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=400,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


# Chat: structured output.


def test_a_streamed_object_is_parsed(client: openai.OpenAI, cluster: Cluster) -> None:
    with client.chat.completions.stream(
        model=cluster.model, messages=MESSAGES, response_format=Person, max_completion_tokens=400
    ) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
    assert {"content.delta", "content.done"} <= kinds


# Responses.


def test_events_make_the_whole_response(client: openai.OpenAI, cluster: Cluster) -> None:
    whole = respond(client, cluster, temperature=0)
    events = list(respond(client, cluster, temperature=0, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join([it.delta for it in events if it.type == "response.output_text.delta"])
    assert text == whole.output_text == events[-1].response.output_text
    with client.responses.stream(
        model=cluster.model, input=QUESTION, temperature=0, max_output_tokens=400
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_calls_a_function(client: openai.OpenAI, cluster: Cluster, stream: bool) -> None:
    asked: Any = {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False}
    if stream:
        events = list(respond(client, cluster, stream=True, **asked))
        answer = events[-1].response
        pieces = [it for it in events if it.type == "response.function_call_arguments.delta"]
        done = [it for it in events if it.type == "response.function_call_arguments.done"]
        assert "".join([it.delta for it in pieces]) == done[0].arguments
        assert not [it for it in events if it.type == "response.output_text.delta"]
    else:
        answer = respond(client, cluster, **asked)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    check_call(call.name, json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    following = respond(
        client, cluster, input=[{"role": "user", "content": QUESTION}, call, result]
    )
    assert following.status in ("completed", "incomplete")


def test_a_response_fills_a_model(client: openai.OpenAI, cluster: Cluster) -> None:
    answer = client.responses.parse(
        model=cluster.model, input=QUESTION, text_format=Person, max_output_tokens=400
    )
    assert isinstance(answer.output_parsed, Person)
    whole = respond(
        client,
        cluster,
        text={"format": {"type": "json_schema", "name": "person", "schema": PERSON}},
    )
    Person.model_validate_json(whole.output_text)


# Responses that continue kept ones.

CALLED: Any = {
    "tools": FLAT,
    "tool_choice": {"type": "function", "name": "get_weather"},
}
brief = partial(respond, input=STORY, max_output_tokens=40, temperature=0)


def test_turns_that_are_kept_are_turns_that_are_sent(
    client: openai.OpenAI, cluster: Cluster
) -> None:
    first = brief(client, cluster, instructions="Be brief.")
    kept = brief(client, cluster, input="And then?", previous_response_id=first.id)
    items = [{"role": "user", "content": STORY}, *first.output]
    sent = brief(client, cluster, input=[*items, {"role": "user", "content": "And then?"}])
    assert kept.output_text == sent.output_text
    assert kept.usage.input_tokens == sent.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    unkept = brief(client, cluster, store=False)
    for name in (first.id, unkept.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            brief(client, cluster, previous_response_id=name)


def test_a_call_is_answered_by_its_output_alone(client: openai.OpenAI, cluster: Cluster) -> None:
    asked: Any = {"input": QUESTION, "max_output_tokens": 400, "temperature": 1, **CALLED}
    first = brief(client, cluster, **asked)
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = brief(client, cluster, input=[output], previous_response_id=first.id, tools=[])
    pages = client.responses.input_items.list(second.id, order="asc", limit=1)
    kinds = [item.type for item in pages]
    assert kinds == ["message", "function_call", "function_call_output"]
    with client.responses.stream(model=cluster.model, **asked) as stream:
        deltas = [it for it in stream if it.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert "".join([it.delta for it in deltas]) == streamed.arguments
    assert isinstance(json.loads(streamed.arguments), dict)


def test_one_that_is_cut_is_incomplete(client: openai.OpenAI, cluster: Cluster) -> None:
    fields: Any = {"max_output_tokens": 2, "extra_body": {"ignore_eos": True}}
    whole = brief(client, cluster, **fields)
    *_, last = brief(client, cluster, stream=True, **fields)
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.output_tokens == 2
    again = brief(client, cluster, input="Go on.", previous_response_id=whole.id)
    assert again.output_text
