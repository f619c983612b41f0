"""The openai package goes on from kept responses: turns, calls and their outputs, pages of them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.clients.questions import QUESTION, STORY, TOOLS
from tests.cluster import Cluster

CALLED: Any = {
    "tools": [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS],
    "tool_choice": {"type": "function", "name": "get_weather"},
}


def respond(client: openai.OpenAI, cluster: Cluster, **fields: Any) -> Any:
    asked: dict[str, Any] = {"input": STORY, "max_output_tokens": 40, "temperature": 0} | fields
    return client.responses.create(model=cluster.model, **asked)


def test_turns_that_are_kept_are_turns_that_are_sent(
    client: openai.OpenAI, cluster: Cluster
) -> None:
    first = respond(client, cluster, instructions="Be brief.")
    kept = respond(client, cluster, input="And then?", previous_response_id=first.id)
    items = [{"role": "user", "content": STORY}, *first.output]
    sent = respond(client, cluster, input=[*items, {"role": "user", "content": "And then?"}])
    assert kept.output_text == sent.output_text
    assert kept.usage.input_tokens == sent.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    unkept = respond(client, cluster, store=False)
    for name in (first.id, unkept.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            respond(client, cluster, previous_response_id=name)


def test_a_call_is_answered_by_its_output_alone(client: openai.OpenAI, cluster: Cluster) -> None:
    asked: Any = {"input": QUESTION, "max_output_tokens": 400, "temperature": 1, **CALLED}
    first = respond(client, cluster, **asked)
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = respond(client, cluster, input=[output], previous_response_id=first.id, tools=[])
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
    whole = respond(client, cluster, **fields)
    *_, last = respond(client, cluster, stream=True, **fields)
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.output_tokens == 2
    again = respond(client, cluster, input="Go on.", previous_response_id=whole.id)
    assert again.output_text
