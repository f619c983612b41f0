"""Streams as bytes: every event is the JSON a plain encoder would write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.chat import ChatAnswer
from router.api.completions.response import DONE
from router.api.errors import HttpError
from router.api.text import TextAnswer
from router.text.output_parts import PlainReader
from router.text.stops import StopAutomaton
from tests.router.api.scripted import Scene
from tests.router.site import events, ids


class Stream(Scene):
    """The chunks of a chat or of a text."""

    def __init__(self, *, is_chat: bool = True, **asked: Any) -> None:
        super().__init__(ChatAnswer if is_chat else TextAnswer, **asked)

    def chunks(self, text: str = "", *, is_over: bool = False) -> list[Any]:
        self.say(text)
        if is_over:
            self.end()
        return events((self.answer.take() + DONE).decode())


def test_a_text_stream_with_echo() -> None:
    stream = Stream(prefix="P:", is_chat=False)
    chunks = stream.chunks("ab") + stream.chunks(is_over=True)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["P:a", "b", ""]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


def test_an_answer_without_text_is_one_chunk() -> None:
    [chunk] = Stream().chunks(is_over=True)
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunk["choices"][0]["finish_reason"] == "stop"


def test_running_usage_needs_usage() -> None:
    stream = Stream(has_usage=True, has_running_usage=True)
    chunks = stream.chunks("ab") + stream.chunks("c", is_over=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 4]
    assert "usage" not in Stream(has_running_usage=True).chunks("a")[0]


def test_token_ids_and_the_prompt_with_the_first() -> None:
    first, second = Stream(has_ids=True).chunks("ab")
    assert first["choices"][0]["token_ids"] == ids("a")
    assert first["prompt_token_ids"] == [8, 9]
    assert second["choices"][0]["token_ids"] == ids("b")
    assert "prompt_token_ids" not in second
    first, second = Stream(has_ids=True, is_chat=False).chunks("ab")
    assert first["choices"][0]["prompt_token_ids"] == [8, 9]
    assert "prompt_token_ids" not in second["choices"][0]


@given(st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=8))
def test_any_text_survives(text: str) -> None:
    stream = Stream()
    chunks = stream.chunks("x" + text, is_over=True)
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(contents) == "x" + text


def test_a_stream_that_breaks_says_so_and_ends() -> None:
    broken = Stream().answer.failure(HttpError(503, "gone", code="worker_lost")).decode()
    [document] = events(broken)
    assert document["error"]["code"] == "worker_lost"
    assert json.loads(HttpError(503, "gone").body)["error"]["type"] == "server_error"
    assert not any(line.startswith("id:") for line in broken.splitlines())


@pytest.mark.parametrize(
    ("asked", "is_usual"),
    [
        ({}, True),
        ({"count": 2}, False),
        ({"has_logprobs": True}, False),
        ({"stops": StopAutomaton(["~"])}, False),
        ({"reader": PlainReader}, False),
    ],
)
def test_what_stands_around_a_text_is_known_where_nothing_else_is_said(
    asked: dict[str, Any], *, is_usual: bool
) -> None:
    stream = Stream(**asked)
    first, second = stream.chunks("a"), stream.chunks("bc")
    assert len(first) + len(second) == 3
    assert (stream.answer.usual is not None) is is_usual
    if stream.answer.usual is not None:
        [chunk] = events((b'"b"'.join(stream.answer.usual) + DONE).decode())
        assert chunk == second[0]
