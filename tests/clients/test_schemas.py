"""Every body and every chunk is what the public OpenAPI description says."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.clients.openai_schema import events_of, validate, validate_event
from tests.clients.questions import MESSAGES, NAMED, PERSON, QUESTION, STORY, TOOLS
from tests.cluster import Cluster

ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [NAMED]},
}
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
USAGE: Any = {"stream": True, "stream_options": {"include_usage": True}}
JSON_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
FORMAT: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
CALLED: Any = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_12345678",
            "type": "function",
            "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'},
        }
    ],
}
RESULT: Any = {"role": "tool", "tool_call_id": "call_12345678", "content": "noon"}

TEXTS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": STORY},
    "two prompts, two choices": {"prompt": [STORY, "Once"], "n": 2},
    "logprobs": {"prompt": STORY, "logprobs": 2},
    "echo": {"prompt": STORY, "echo": True},
    "stopped": {"prompt": STORY, "stop": [" "]},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "one token": {"max_completion_tokens": 1},
    "allowed tools": {"tools": TOOLS, "tool_choice": ALLOWED},
    "calls of two choices": {"tools": TOOLS, "tool_choice": "required", "n": 2},
    "a call with logprobs": {"tools": TOOLS, "tool_choice": "required", "logprobs": True},
    "tools that may be called": {"tools": TOOLS},
    "a result": {"messages": [*MESSAGES, CALLED, RESULT], "tools": TOOLS},
    "an object of a schema": {"response_format": JSON_SCHEMA},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "told": {"instructions": "Be brief.", "metadata": {"a": "b"}},
    "turns": {"input": [*MESSAGES, {"role": "assistant", "content": "Sun."}, *MESSAGES]},
    "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": STORY}]}]},
    "logprobs": {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    "at its limit": {"max_output_tokens": 2},
    "a required call": {"tools": FLAT, "tool_choice": "required"},
    "allowed tools": {
        "tools": FLAT,
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "get_time"}],
        },
    },
    "tools that may be called": {"tools": FLAT},
    "an object of a schema": {"text": FORMAT},
    "not stored": {"store": False},
}


def post(cluster: Cluster, path: str, **body: Any) -> httpx.Response:
    with httpx.Client(base_url=cluster.http, timeout=60, trust_env=False) as http:
        return http.post(path, json={"model": cluster.model, **body})


def body_of(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("fields", TEXTS.values(), ids=TEXTS)
def test_completions(cluster: Cluster, fields: dict[str, Any]) -> None:
    asked = {"max_tokens": 24} | fields
    validate("CreateCompletionResponse", body_of(post(cluster, "/v1/completions", **asked)))
    for chunk in events_of(post(cluster, "/v1/completions", **asked, **USAGE)):
        # The description is that of the whole answer; OpenAI streams null here until the end,
        # and null usage until the last chunk.
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        if chunk["usage"] is None:
            del chunk["usage"]
        validate("CreateCompletionResponse", chunk)


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS)
def test_chats(cluster: Cluster, fields: dict[str, Any]) -> None:
    asked = {"messages": MESSAGES, "max_completion_tokens": 200} | fields
    whole = body_of(post(cluster, "/v1/chat/completions", **asked))
    validate("CreateChatCompletionResponse", whole)
    for chunk in events_of(post(cluster, "/v1/chat/completions", **asked, **USAGE)):
        validate("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("fields", RESPONSES.values(), ids=RESPONSES)
def test_responses(cluster: Cluster, fields: dict[str, Any]) -> None:
    asked = {"input": QUESTION, "max_output_tokens": 200} | fields
    whole = body_of(post(cluster, "/v1/responses", **asked))
    validate("Response", whole)
    for event in events_of(post(cluster, "/v1/responses", **asked, stream=True)):
        validate_event(event)
    if fields.get("store", True):
        following = post(cluster, "/v1/responses", input="Go on.", previous_response_id=whole["id"])
        validate("Response", body_of(following))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": STORY, "n": 0}),
        ("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": NAMED}),
        ("/v1/chat/completions", {"messages": MESSAGES, "response_format": {"type": "yaml"}}),
        ("/v1/responses", {}),
        ("/v1/responses", {"input": QUESTION, "tools": [{"type": "file_search"}]}),
    ],
)
def test_refusals(cluster: Cluster, path: str, fields: dict[str, Any]) -> None:
    refused = post(cluster, path, **fields)
    assert refused.status_code == 400, refused.text
    validate("ErrorResponse", refused.json())


def test_lists_and_what_is_not_there(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.http, timeout=60, trust_env=False) as http:
        validate("ListModelsResponse", http.get("/v1/models").json())
        for path in ("/v1/nowhere", "/v1/models/none", "/v1/responses/resp_none"):
            answer = http.get(path)
            assert answer.status_code == 404
            validate("ErrorResponse", answer.json())
