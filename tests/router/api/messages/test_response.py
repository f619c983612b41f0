"""A message, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.errors import HttpError
from router.api.messages.response import MessageAnswer, read_arguments
from router.text.output_parts import CallArguments, CallEnd, CallStart, Content, Part, Reasoning
from router.text.stops import StopAutomaton
from tests.router.api.messages.stream import message_of, read_events, without_ids
from tests.router.api.scripted import Scene
from tests.router.site import ids
from wire.payloads import PrefillResult

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=12,
)


class Dictated:
    """A reader that finds what it was told to find, a part in each text; the rest at the end."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = iter(parts)

    def feed(self, text: str) -> list[Part]:
        return [next(self._parts)] if text else []

    def flush(self) -> list[Part]:
        return list(self._parts)


class Said(Scene):
    """A message of which every token is a letter of `text`, or a part of `parts`."""

    def __init__(
        self,
        text: str,
        parts: Sequence[Part] | None = None,
        *,
        stop: str = "",
        limit: int = 99,
        eager: Collection[str] = (),
    ) -> None:
        self._text, self._length = text, 0
        super().__init__(
            partial(MessageAnswer, max_tokens=limit, eager=eager),
            prompt=(8, 9, 8, 9, 8),
            stops=StopAutomaton([stop]) if stop else None,
            reader=None if parts is None else partial(Dictated, parts),
        )

    def go_on(self, num_tokens: int) -> None:
        token_ids = ids(self._text[self._length : self._length + num_tokens])
        if token_ids and not self._length:
            first = PrefillResult(token_id=token_ids.pop(0), cached_tokens=2)
            self.core.sinks[0].on_prefill(first, 0)
        self._length += num_tokens
        self.say_ids(token_ids)

    def finish(self, reason: str) -> None:
        self.go_on(len(self._text))
        if not self.completion.choices[0].is_over:
            self.end(reason)

    def whole(self, reason: str = "stop") -> dict[str, Any]:
        self.finish(reason)
        return self.body()

    def events(self, sizes: Sequence[int] = (), reason: str = "stop") -> list[dict[str, Any]]:
        found = []
        for size in sizes:
            self.go_on(size)
            found += read_events(self.answer.take())
        self.finish(reason)
        return found + read_events(self.answer.take() + self.answer.end())


def usage(output_tokens: int) -> dict[str, int]:
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 2}
    return {"input_tokens": 3, "output_tokens": output_tokens, **cache}


def test_a_message() -> None:
    message = Said("hey").whole()
    message["usage"].pop("output_tokens")
    assert message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hey"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {k: v for k, v in usage(3).items() if k != "output_tokens"},
    }


def test_the_events_of_a_text() -> None:
    events = Said("ab", limit=2).events([1], "length")
    start, *others = events
    assert start["message"]["usage"] == usage(0)
    assert start["message"]["stop_reason"] is None
    assert others == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
            "usage": usage(2),
        },
        {"type": "message_stop"},
    ]


def test_thoughts_and_calls() -> None:
    parts: list[Part] = [
        Reasoning("hm"),
        Content("Let me see."),
        CallStart(0, "get"),
        CallArguments(0, '{"city": "R'),
        CallArguments(0, 'ome"}'),
        CallEnd(0),
        CallStart(1, "now"),
        CallArguments(1, "{"),
        CallArguments(1, "}"),
        CallEnd(1),
    ]
    message = without_ids(Said("abcdefghi", parts).whole())
    assert message["stop_reason"] == "tool_use"
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "get", "input": {"city": "Rome"}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    # Arguments come together, but for the tools that a client wants them of as they are written.
    for eager, num_deltas in ((), 2), ({"get"}, 3):
        kinds = [
            event["delta"]["type"]
            for event in Said("abcdefghi", parts, eager=eager).events()
            if "index" in event and "delta" in event
        ]
        assert kinds[:3] == ["thinking_delta", "signature_delta", "text_delta"]
        assert kinds[3:] == ["input_json_delta"] * num_deltas


@pytest.mark.parametrize("text", ['{"a": "x\ny"}', '{"a": NaN}', '{"a": 1,}', r'{"a": "\d"}'])
def test_arguments_that_do_not_parse_break_no_client(text: str) -> None:
    def said(*, eager: Collection[str] = ()) -> Said:
        parts: list[Part] = [CallStart(0, "get"), CallArguments(0, text), CallStart(1, "get")]
        return Said("abc", parts, eager=eager)

    streamed = message_of(said().events())
    assert without_ids(streamed) == without_ids(said().whole())
    assert streamed["stop_reason"] == "end_turn"
    deltas = [it["delta"] for it in said(eager={"get"}).events() if "index" in it and "delta" in it]
    assert deltas == [{"type": "input_json_delta", "partial_json": text}]


def test_why_it_ended() -> None:
    def reasons(said: Said, reason: str) -> tuple[str, str | None]:
        message = said.whole(reason)
        return message["stop_reason"], message["stop_sequence"]

    assert reasons(Said("abc"), "stop") == ("end_turn", None)
    assert reasons(Said("abc", limit=3), "length") == ("max_tokens", None)
    assert reasons(Said("abc"), "length") == ("model_context_window_exceeded", None)
    assert reasons(Said("ab", limit=3), "length") == ("model_context_window_exceeded", None)
    assert reasons(Said("abcd", stop="cd"), "stop") == ("stop_sequence", "cd")
    call: list[Part] = [CallStart(0, "get"), CallArguments(0, "{}")]
    assert reasons(Said("abcd", call, stop="cd"), "stop") == ("stop_sequence", "cd")
    assert reasons(Said("ab", call), "stop") == ("end_turn", None)
    assert reasons(Said("abcd", [*call, CallEnd(0)], stop="cd"), "stop") == ("tool_use", None)
    cut: list[Part] = [CallStart(0, "get"), CallArguments(0, '{"a": ["x", "y')]
    message = Said("ab", cut, limit=2).whole("length")
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {"a": ["x"]}


def test_a_stream_that_breaks_ends_with_an_error() -> None:
    said = Said("ab")
    error = HttpError(503, "worker lost", code="worker_lost")
    (event,) = read_events(said.answer.failure(error))
    assert event == {
        "type": "error",
        "error": {
            "type": "overloaded_error",
            "message": "worker lost",
            "details": {"error_code": "worker_lost"},
        },
        "request_id": "1",
    }


def test_a_silence_has_an_event_of_its_own() -> None:
    assert Said("").answer.ping == b'event: ping\ndata: {"type":"ping"}\n\n'


TEXTS = st.text(max_size=4)


@st.composite
def answers(draw: st.DrawFn) -> list[Part]:
    """Parts as readers give them: arguments follow their call, in pieces that make an object."""
    parts: list[Part] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from([Content, Reasoning, CallStart]), max_size=8)):
        if kind is not CallStart:
            parts.append(kind(draw(TEXTS)))
            continue
        parts.append(CallStart(num_calls, draw(st.sampled_from(["get", "now"]))))
        values = st.integers() | st.text() | st.lists(st.booleans())
        text = json.dumps(draw(st.dictionaries(st.text(), values, max_size=3)))
        parts += [CallArguments(num_calls, piece) for piece in draw(cuts(text))]
        parts.append(CallEnd(num_calls))
        num_calls += 1
    return parts


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[begin:end] for begin, end in _spans(places, len(text))]


def _spans(places: list[int], length: int) -> Iterator[tuple[int, int]]:
    return zip([0, *places], [*places, length], strict=True)


@given(
    answers(),
    st.lists(st.integers(0, 5), max_size=8),
    st.sampled_from(["stop", "length"]),
    st.integers(0, 40),
)
def test_a_stream_makes_the_whole_message(
    parts: list[Part], sizes: list[int], reason: str, length: int
) -> None:
    parts = parts[:length]
    text = "x" * max(len(parts) - 1, 0)  # the last part comes with the end
    streamed = message_of(Said(text, parts).events(sizes, reason))
    assert without_ids(streamed) == without_ids(Said(text, parts).whole(reason))


@given(st.dictionaries(st.text(), JSON, max_size=5), st.data(), st.sampled_from([None, 1]))
def test_arguments_cut_short_are_read_as_the_official_client_reads_them(
    value: dict[str, Any], data: st.DataObject, indent: int | None
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    cut = text[: data.draw(st.integers(1, len(text)))]
    assert read_arguments(cut) == jiter.from_json(cut.encode(), partial_mode=True)


@pytest.mark.parametrize(
    "text", ["", "x", "[1, 2", "7", '"a', "{'a': 1}", '{"a": 1,}', "}" * 9, "}{", "\ud800"]
)
def test_arguments_that_are_no_object_say_nothing(text: str) -> None:
    assert read_arguments(text) == {}


def test_arguments_too_deep_to_read_say_nothing() -> None:
    assert read_arguments('{"a":' * 100_000) == {}


@given(st.text('{}[]",:\\ 1tru\n'))
def test_any_text_can_be_read_as_arguments(text: str) -> None:
    assert isinstance(read_arguments(text), dict)
