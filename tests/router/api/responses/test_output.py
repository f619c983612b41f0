"""The output of a response: however its parts come the items are the same, and events say them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from router.api.responses.output import Output
from router.text.output_parts import CallArguments, CallEnd, CallStart, Content, Part, Reasoning
from tests.clients.openai_schema import validate_event
from tests.router.api.responses.asking import assembled, events_of, without_call_ids


def said(pieces: list[list[Part]], status: str = "completed") -> Output:
    output = Output("k", is_streamed=True)
    for parts in pieces:
        output.add(parts)
    output.end(status)
    return output


TEXTS = st.text(alphabet='aé"{\\ 日\n', max_size=6)


@st.composite
def answers(draw: st.DrawFn) -> list[Part]:
    parts: list[Part] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from("rct"), max_size=6)):
        texts = draw(st.lists(TEXTS, max_size=4))
        if kind == "t":
            parts += [CallStart(calls, "tool"), *(CallArguments(calls, text) for text in texts)]
            if draw(st.booleans()):
                parts.append(CallEnd(calls))
            calls += 1
        else:
            make = Reasoning if kind == "r" else Content
            parts += [make(text) for text in texts]
    return parts


@given(
    answers(),
    st.lists(st.integers(0, 30), max_size=8),
    st.sampled_from(["completed", "incomplete"]),
)
def test_a_stream_says_what_the_whole_says(parts: list[Part], cuts: list[int], status: str) -> None:
    borders = [0, *sorted(cuts), len(parts)]
    pieces = [parts[begin:end] for begin, end in itertools.pairwise(borders)]
    output = said(pieces, status)
    events = events_of(output.take_events())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = output.items(status)
    assert assembled(events) == items
    assert without_call_ids(items) == without_call_ids(said([parts], status).items(status))
    finished = [CallEnd(part.index) in parts for part in parts if isinstance(part, CallStart)]
    expected = ["completed" if it else "incomplete" for it in finished]
    calls = [item for item in items if item["type"] == "function_call"]
    assert [item["status"] for item in calls] == expected
    others = [item["status"] for item in items if item not in calls]
    ends = [status] if items[-1] not in calls else []
    assert others == ["completed"] * (len(others) - len(ends)) + ends
    assert output.is_cut == ("incomplete" in [*others, *expected])


def test_every_event_is_what_openais_schema_says() -> None:
    parts: list[Part] = [
        Reasoning("Hm."),
        Content("Hi"),
        CallStart(0, "get"),
        CallArguments(0, "{}"),
    ]
    for event in events_of(said([parts]).take_events()):
        validate_event(event)


def test_nothing_said_is_an_empty_message() -> None:
    [item] = said([]).items("completed")
    assert item["content"] == [
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    ]


def test_calls_have_ids_of_their_own_and_the_items_another() -> None:
    parts: list[Part] = [CallStart(0, "a"), CallArguments(0, "{}"), CallStart(1, "a")]
    first, second = said([parts]).items("completed")
    assert first["call_id"] != second["call_id"]
    assert (first["id"], second["id"]) == ("fc_k000", "fc_k001")


def test_scores_go_with_their_text_and_wait_for_none() -> None:
    output = Output("k", is_streamed=True)
    output.add([], ["half"])
    output.add([Content("é")], ["other half"])
    output.add([], ["without text"])
    output.end("completed")
    events = events_of(output.take_events())
    assert assembled(events) == output.items("completed")
    [item] = output.items("completed")
    assert item["content"][0]["logprobs"] == ["half", "other half", "without text"]


def test_no_text_begins_no_item() -> None:
    [item] = said([[Reasoning("Hm."), Content("")]]).items("completed")
    assert item["type"] == "reasoning"
