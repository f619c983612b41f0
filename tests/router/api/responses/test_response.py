"""A response, whole and streamed: the same object, however the tokens came."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.errors import HttpError
from router.api.responses.response import FixedFields, ResponseAnswer
from router.text.reasoning import FAMILIES, read_reasoning
from router.text.scan import AnswerReader, Scan, Steps
from router.text.tools import hermes
from tests.clients.openai_schema import validate_event, validator
from tests.router.api.responses.asking import (
    asked,
    assembled,
    events_of,
    without_call_ids,
)
from tests.router.api.scripted import Scene
from tests.router.site import ids

RESPONSE = validator("Response")
THINKING = "<think>ab</think>c"
CALLS = (
    'So: <tool_call>\n{"name": "a", "arguments": {"x": "é}"}}\n</tool_call>\n'
    '<tool_call>{"name": "b", "arguments": {}}</tool_call>'
)


def read(scan: Scan) -> Steps[None]:
    yield from read_reasoning(scan, FAMILIES["qwen3"], is_open=False)
    yield from hermes.read(scan)


class Answering(Scene):
    """A response, and what is kept of it."""

    def __init__(self, *, is_streamed: bool, reads: bool = True, **fields: Any) -> None:
        self.kept: list[dict[str, Any]] = []
        echo = asked(**fields).echo()
        fixed = FixedFields("k", echo, lambda it: self.kept.append(json.loads(it)))
        super().__init__(
            partial(ResponseAnswer, fixed=fixed),
            reader=(lambda: AnswerReader(read)) if reads else None,
            shows_reasoning=fields.get("include_reasoning", True),
            is_streamed=is_streamed,
            has_logprobs="include" in fields,
        )

    def stream(self, text: str, moments: list[int], reason: str = "stop") -> list[dict[str, Any]]:
        """The events where what has come is taken at these moments."""
        raw = b""
        for position, token_id in enumerate(ids(text)):
            self.say_ids([token_id])
            if position in moments:
                raw += self.answer.take()
        self.end(reason)
        while not self.completion.is_over:
            raw += self.answer.take()
        return events_of(raw + self.answer.end())

    def whole(self, text: str, reason: str = "stop") -> dict[str, Any]:
        self.say(text)
        self.end(reason)
        return self.body()


def same(response: dict[str, Any]) -> dict[str, Any]:
    return response | {"output": without_call_ids(response["output"])}


def test_a_whole_response() -> None:
    subject = Answering(is_streamed=False)
    body = subject.whole("hello")
    RESPONSE.validate(body)
    assert (body["id"], body["status"], body["created_at"]) == ("resp_k", "completed", 7)
    [message] = body["output"]
    assert (message["id"], message["status"]) == ("msg_k000", "completed")
    assert message["content"][0]["text"] == "hello"
    assert body["usage"]["input_tokens"] == 2
    assert body["usage"]["total_tokens"] == 2 + body["usage"]["output_tokens"]
    assert subject.kept == [body]


def test_what_has_come_is_sent_at_once() -> None:
    subject = Answering(is_streamed=True)
    for text in ("hel", "lo"):
        subject.say(text)
        events = events_of(subject.answer.take())
        assert "".join([event.get("delta", "") for event in events]) == text


def test_reasoning_is_an_item_and_its_tokens_are_counted() -> None:
    body = Answering(is_streamed=False).whole(THINKING)
    RESPONSE.validate(body)
    reasoning, message = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "ab"}]
    assert message["content"][0]["text"] == "c"
    # With the mark that ends it.
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": len("ab</think>")}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_reasoning_can_be_left_out(is_streamed: bool) -> None:
    subject = Answering(is_streamed=is_streamed, include_reasoning=False)
    if is_streamed:
        body = subject.stream(THINKING, [7, 9])[-1]["response"]
    else:
        body = subject.whole(THINKING)
    assert [item["type"] for item in body["output"]] == ["message"]
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_one_that_was_cut_says_so() -> None:
    body = Answering(is_streamed=False).whole("hel", "length")
    RESPONSE.validate(body)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"


def test_the_order_of_events() -> None:
    events = Answering(is_streamed=True).stream("hi", [0])
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    for event in events:
        validate_event(event)
    begun, done = events[0]["response"], events[-1]["response"]
    assert done.pop("usage")["output_tokens"] == 3
    assert begun == done | {"status": "in_progress", "output": []}


@given(
    st.sampled_from(
        [
            CALLS,
            CALLS[:60],
            THINKING + CALLS,
            THINKING[:9],
            "",
            "plain é text <tool_call> that is none",
            "é" * 40,
        ]
    ),
    st.lists(st.integers(0, 140), max_size=12),
    st.sampled_from(["stop", "length"]),
    st.booleans(),
)
def test_a_stream_says_what_the_whole_says(
    text: str, moments: list[int], reason: str, reads: bool
) -> None:
    subject = Answering(is_streamed=True, reads=reads)
    events = subject.stream(text, moments, reason)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert assembled(events) == response["output"]
    assert same(response) == same(Answering(is_streamed=False, reads=reads).whole(text, reason))
    assert subject.kept == [response]


@settings(max_examples=10)  # each is validated event by event
@given(st.lists(st.integers(0, 9), max_size=4))
def test_scores_of_a_stream_are_those_of_the_whole(moments: list[int]) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    for text, reads in (("héy", False), ("héy", True), (THINKING, True), ("<think>ab", True)):
        events = Answering(is_streamed=True, reads=reads, **fields).stream(text, moments)
        for event in events:
            validate_event(event)
        whole = Answering(is_streamed=False, reads=reads, **fields).whole(text)
        RESPONSE.validate(whole)
        assert assembled(events) == events[-1]["response"]["output"] == whole["output"]
        for message in [item for item in whole["output"] if item["type"] == "message"]:
            scores = message["content"][0]["logprobs"]
            assert [score["logprob"] for score in scores] == [-0.5] * len(ids(text))
            assert scores[0]["top_logprobs"][0]["token"] == text[0]


@pytest.mark.parametrize(("status", "code"), [(503, "server_error"), (429, "rate_limit_exceeded")])
def test_one_that_broke(status: int, code: str) -> None:
    subject = Answering(is_streamed=True)
    subject.say("he")
    begun = subject.answer.take()
    events = events_of(begun + subject.answer.failure(HttpError(status, "gone")))
    for event in events:
        validate_event(event)
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": code, "message": "gone"}
    assert response["output"][0]["status"] == "incomplete"
    assert subject.kept == []
