"""A choice: tokens in, pieces out.  A completion: all choices or none, errors end the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.chat import ChatAnswer
from router.api.completions.completion import (
    MAX_AT_ONCE,
    MAX_PENDING_TOKENS,
    Choice,
    CompletionRequest,
)
from router.api.completions.deltas import Delta
from router.api.completions.usage import usage_body
from router.text.stops import StopAutomaton
from router.text.tokenizer import Tokenizer
from tests.circles import circles
from tests.router.api.scripted import Core, started
from tests.router.ends import ended
from tests.router.site import LETTERS, ids
from wire.errors import ErrorCode, WireError
from wire.logprobs import join_prompt_logprobs, pack_logprobs
from wire.payloads import Logprobs, PrefillResult, Usage

TOKENIZER = Tokenizer(LETTERS)
[BANG], [HALF, OTHER_HALF] = ids("!"), ids("é")
GONE = WireError(ErrorCode.WORKER_LOST, "gone")
# With the path of tokens that show nothing but text, and with the other one.
BOTH_PATHS = pytest.mark.parametrize("stops", [(), ("zzz",)])


def choice(
    *stops: str,
    prompt: Sequence[int] = (1, 2, 3),
    prefix: str = "",
    max_tokens: int = 99,
    wake: Callable[[Choice], None] = lambda choice: None,
    **output: Any,
) -> Choice:
    automaton = StopAutomaton(stops) if stops else None
    request = CompletionRequest(answer=ChatAnswer, tokenizer=TOKENIZER, stops=automaton, **output)
    return Choice(0, prompt, request, wake, prefix, max_tokens)


def say(target: Choice, text: str) -> None:
    for token_id in ids(text):
        target.on_token(token_id, Logprobs(logprob=-1.0))


def done(target: Choice, reason: str = "stop") -> None:
    target.on_done(Usage(finish_reason=reason))


def texts(pieces: list[Delta]) -> list[tuple[str, str | None]]:
    return [(piece.text, piece.finish_reason) for piece in pieces]


@BOTH_PATHS
def test_the_end_goes_out_with_the_last_token_or_alone(stops: tuple[str, ...]) -> None:
    subject = choice(*stops)
    say(subject, "ab")
    done(subject, "length")
    assert texts(subject.take()) == [("a", None), ("b", "length")]
    assert subject.is_over
    taken = choice(*stops)
    say(taken, "a")
    assert texts(taken.take()) == [("a", None)]
    done(taken)
    assert texts(taken.take()) == [("", "stop")]
    assert (taken.take(), taken.num_divertible) == ([], 0)


@BOTH_PATHS
def test_the_last_token_waits_for_the_end_or_for_an_error(stops: tuple[str, ...]) -> None:
    for end, reason in ((partial(done, reason="length"), "length"), (fail, None)):
        subject = choice(*stops, max_tokens=2)
        say(subject, "ab")
        assert subject.num_divertible == 0
        assert texts(subject.take()) == [("a", None)] and subject.lag == 0
        end(subject)
        assert texts(subject.take()) == [("b", reason)]
        assert subject.num_tokens == 2 and subject.is_over


def fail(target: Choice) -> None:
    target.on_error(GONE)


@BOTH_PATHS
def test_half_a_character_waits_for_the_other_half(stops: tuple[str, ...]) -> None:
    subject = choice(*stops, has_ids=True)
    subject.on_token(HALF, None)
    assert subject.take() == [Delta("", [HALF], [])]
    subject.on_token(OTHER_HALF, None)
    assert subject.take() == [Delta("é", [OTHER_HALF], [])]


def test_tokens_that_show_nothing_but_text_can_be_diverted() -> None:
    diverted, woken = list[int](), list[Choice]()
    subject = choice(max_tokens=5)
    say(subject, "a")
    assert subject.num_divertible == 0, "one is to be taken first"
    subject.take()
    assert subject.num_divertible == 3, "the last one goes with the end"
    json_of = subject.divert(lambda token_id, logprobs: diverted.append(token_id), woken.append)
    say(subject, "bé")
    assert b"".join(json_of(token_id) for token_id in diverted) == '"b""""é"'.encode()
    assert (subject.lag, woken) == (0, [])
    done(subject)
    assert woken == [subject], "an end is no token"
    subject.end_diversion(3)
    assert (texts(subject.take()), subject.num_tokens) == ([("", "stop")], 5)


def test_half_a_character_may_be_diverted_without_the_other_half() -> None:
    subject = choice()
    subject.on_token(HALF, None)
    assert texts(subject.take()) == [("", None)]
    assert choice(has_ids=True).num_divertible == choice(has_logprobs=True).num_divertible == 0
    json_of = subject.divert(lambda token_id, logprobs: None, lambda choice: None)
    assert [json_of(OTHER_HALF), json_of(HALF)] == ['"é"'.encode(), b'""']
    subject.end_diversion(2)
    subject.on_token(OTHER_HALF, None)
    assert texts(subject.take()) == [("é", None)]


@pytest.mark.parametrize(
    ("stops", "output", "token_ids", "stop_token", "said"),
    [
        # A stop string: across tokens, one of several, shown, and where there must be more tokens.
        (["lo w"], {}, ids("hello world"), None, ("hel", 7, "lo w")),
        (["lo", "zz"], {}, ids("hello"), None, ("hel", 5, "lo")),
        (["lo"], {"has_stop_text": True}, ids("hello"), None, ("hello", 5, "lo")),
        (["a"], {"min_tokens": 2}, ids("aaba"), None, ("aab", 4, "a")),
        # A stop token, of the request or the model's own.
        ([], {}, ids("ab"), BANG, ("ab", 3, None)),
        ([], {"has_stop_text": True}, ids("ab"), BANG, ("ab!", 3, None)),
        ([], {"stop_token_ids": {BANG}}, ids("ab"), BANG, ("ab", 3, BANG)),
        ([], {"has_stop_text": True}, [], HALF, ("\ufffd", 1, None)),
        # EOS, after half a character.
        ([], {}, [HALF], None, ("\ufffd", 2, None)),
    ],
)
def test_what_stops_a_choice(
    stops: list[str],
    output: dict[str, Any],
    token_ids: list[int],
    stop_token: int | None,
    said: tuple[Any, ...],
) -> None:
    subject = choice(*stops, has_ids=True, **output)
    for token_id in token_ids:
        subject.on_token(token_id, None)
    if not stops:
        subject.on_done(Usage(finish_reason="stop", stop_token_id=stop_token))
    pieces = subject.take()
    text = "".join(piece.text for piece in pieces)
    assert (text, subject.num_tokens, subject.stop_reason) == said
    assert pieces[-1].finish_reason == subject.finish_reason == "stop"
    named = [token_id for piece in pieces for token_id in piece.token_ids]
    assert named == [*token_ids[: said[1]], *([] if stop_token is None else [stop_token])]
    say(subject, "more")
    assert subject.take() == []


def test_eos_as_the_first_token_has_no_text() -> None:
    subject = choice()
    subject.on_prefill(PrefillResult(token_id=1, cached_tokens=2, finish_reason="stop"), 0)
    done(subject)
    assert texts(subject.take()) == [("", "stop")]
    assert (subject.num_tokens, subject.cached_tokens) == (1, 2)


def test_special_tokens_may_be_shown() -> None:
    for shown, text in ((TOKENIZER.special_ids, "<s>"), (frozenset[int](), "")):
        subject = choice(shown=shown)
        subject.on_token(0, None)
        assert texts(subject.take()) == [(text, None)]


def test_a_choice_that_is_not_streamed_wakes_its_writer_at_the_end_alone() -> None:
    woken: list[Choice] = []
    subject = choice(wake=woken.append, is_streamed=False)
    say(subject, "abc")
    assert woken == []
    done(subject)
    assert woken == [subject]


@given(st.text(alphabet="ab日", max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_when_it_is_taken_never_changes_the_text(text: str, cuts: list[int]) -> None:
    results = set()
    for has_ids in (False, True):
        for moments in ([], cuts):
            subject = choice("ba", has_ids=has_ids)
            shown = []
            for position, token_id in enumerate(ids(text)):
                subject.on_token(token_id, None)
                if position in moments:
                    shown += subject.take()
            done(subject, "length")
            shown += subject.take()
            assert [piece.finish_reason is None for piece in shown].count(False) == 1
            results.add(("".join(piece.text for piece in shown), shown[-1].finish_reason))
    assert results == {(text.split("ba")[0], "stop" if "ba" in text else "length")}


# Log-probabilities.


def test_scores_travel_with_their_token() -> None:
    subject = choice(has_logprobs=True)
    say(subject, "xé")
    pieces = subject.take()
    assert [len(piece.scores) for piece in pieces] == [1, 1, 1]
    scores = Logprobs(logprob=-2.0)
    subject.on_done(Usage(finish_reason="stop", stop_token_id=BANG, stop_logprobs=scores))
    pieces += subject.take()
    all_scores = [score for piece in pieces for score in piece.scores]
    assert [score.text_offset for score in all_scores] == [0, 1, 1, 2]
    assert (all_scores[-1].token_id, all_scores[-1].logprobs) == (BANG, scores)


def prompt_read(*logprobs: float, **fields: Any) -> PrefillResult:
    rows = [Logprobs(logprob=value, top=((7, value),)) for value in logprobs]
    packed = join_prompt_logprobs(1, map(pack_logprobs, rows))
    return PrefillResult(token_id=ids("d")[0], prompt_logprobs=packed, **fields)


def test_the_prompts_scores_may_stand_alone() -> None:
    subject = choice(has_prompt_logprobs=True)
    subject.on_prefill(prompt_read(-1, -2), 0)
    [piece] = subject.take()
    assert [score.token_id for score in piece.prompt_scores] == [1, 2, 3]
    assert list(piece.scores) == []


def echoing(prefix: str, prompt: Sequence[int], *, is_echo_only: bool = False) -> Choice:
    scored: dict[str, Any] = {
        "has_logprobs": True,
        "has_echo_logprobs": True,
        "is_echo_only": is_echo_only,
    }
    return choice(prompt=prompt, prefix=prefix, **scored)


def test_the_prompts_scores_come_with_the_first_piece() -> None:
    subject = echoing("abc", ids("abc"))
    subject.on_prefill(prompt_read(-2, -3, logprobs=Logprobs(logprob=-4.0)), 0)
    [piece] = subject.take()
    logprobs = [score.logprobs and score.logprobs.logprob for score in piece.scores]
    assert logprobs == [None, -2, -3, -4]
    assert [score.text_offset for score in piece.scores] == [0, 1, 2, 3]
    assert [score.token_id for score in piece.scores] == ids("abcd")
    say(subject, "e")
    assert [len(piece.scores) for piece in subject.take()] == [1]


@pytest.mark.parametrize(
    ("prefix", "offsets"),
    [("ab", [0, 0, 1]), ("<s>ab", [0, 3, 4]), ("", [0, 0, 0])],
    ids=["added", "sent", "shorter than its tokens"],
)
def test_special_tokens_have_room_only_where_they_are_echoed(
    prefix: str, offsets: list[int]
) -> None:
    subject = echoing(prefix, [0, *ids("ab")])
    subject.on_prefill(prompt_read(-2, -3), 0)
    [piece] = subject.take()
    assert [score.text_offset for score in piece.scores] == [*offsets, len(prefix)]


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_an_echo_alone_has_no_token_of_its_own(reason: str) -> None:
    subject = echoing("abc", ids("abc"), is_echo_only=True)
    subject.on_prefill(prompt_read(-2, -3, finish_reason="length"), 0)
    done(subject, reason)  # that of the token which is not shown
    [piece] = subject.take()
    assert (piece.text, piece.finish_reason, len(piece.scores)) == ("", "length", 3)
    assert subject.num_tokens == 0


@pytest.mark.parametrize(
    "refusal",
    [WireError(ErrorCode.OVERLOADED, "full"), ValueError("full"), KeyboardInterrupt("full")],
    ids=lambda refusal: type(refusal).__name__,
)
def test_all_are_submitted_or_none(refusal: BaseException) -> None:
    core = Core(capacity=2, refusal=refusal)
    with pytest.raises(type(refusal), match="full"):
        started(core, 3)
    assert core.cancelled == [1, 2]


def test_one_wake_for_what_comes_together() -> None:
    core = Core()
    subject, writer = started(core)
    for token_id in ids("abc"):
        core.sinks[0].on_token(token_id, None)
    assert writer.wakes == 1
    [(choice, pieces)] = subject.take()
    assert choice.index == 0
    assert len(pieces) == subject.num_new_tokens == 3
    core.sinks[0].on_token(ids("d")[0], None)
    assert writer.wakes == 2


def test_a_stop_string_ends_its_own_request_only_and_well() -> None:
    core = Core()
    subject, writer = started(core, stop="b")
    for token_id in ids("abc"):
        core.sinks[1].on_token(token_id, None)
    subject.take()
    assert (core.stopped, core.cancelled) == ([2], [])
    assert not subject.is_over
    wakes = writer.wakes
    core.sinks[1].on_token(ids("d")[0], None)
    assert (writer.wakes, subject.take()) == (wakes, [])


def test_an_error_ends_all() -> None:
    core = Core()
    subject, _ = started(core, 3)
    core.sinks[0].on_done(Usage(finish_reason="stop"))
    core.sinks[1].on_error(WireError(ErrorCode.WORKER_LOST, "gone"))
    subject.take()
    assert subject.is_over
    assert subject.error is not None and subject.error.code is ErrorCode.WORKER_LOST
    assert core.cancelled == [3]


def test_cancel_is_idempotent() -> None:
    core = Core()
    subject, _ = started(core)
    subject.cancel()
    subject.cancel()
    assert core.cancelled == [1, 2]


def test_completions_that_ended_leave_nothing_to_the_garbage_collector() -> None:
    with circles() as found:
        for _ in range(2):
            subject, _ = started(Core())
            subject.cancel()
            subject.drop_callbacks()
            del subject
    assert not found


def test_a_writer_that_lags_is_told() -> None:
    core = Core()
    _, writer = started(core)
    for token_id in ids("a") * (MAX_PENDING_TOKENS + 3):
        core.sinks[0].on_token(token_id, None)
    assert writer.overruns == 3


def test_usage_counts_a_prompt_once() -> None:
    core = Core()
    subject, _ = started(core, 4, per_prompt=2)
    for sink in core.sinks:
        sink.on_prefill(PrefillResult(token_id=ids("a")[0], cached_tokens=2), 64)
        sink.on_done(Usage(finish_reason="stop", kv_bytes=100, kv_skipped_tokens=1, kv_seconds=0.5))
    subject.take()
    usage = usage_body(subject.choices, 2, has_baton=True)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 8, 14)
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert usage.baton is not None and usage.baton.kv_transfer is not None
    transfer = usage.baton.kv_transfer
    assert (transfer.bytes, transfer.skipped_tokens) == (400, 4)
    assert [choice.num_tokens for choice in subject.choices] == [2] * 4, "EOS counts"


def test_a_stop_in_the_first_token_ends_it_before_a_decode_worker_is_asked() -> None:
    core, taken = Core(), list[Any]()
    subject, writer = started(core, 2, stop="d")
    vars(writer)["write"] = lambda: taken.extend(subject.take())
    core.sinks[1].on_prefill(PrefillResult(token_id=ids("e")[0]), 0)
    assert core.stopped == []
    core.sinks[0].on_prefill(PrefillResult(token_id=ids("d")[0]), 0)
    assert (core.stopped, core.cancelled) == ([1], [])
    [_, (stopped, pieces)] = taken
    assert (stopped.finish_reason, pieces[-1].text) == ("stop", "")


def test_what_came_before_an_error_is_shown_though_it_is_very_much() -> None:
    subject, writer = started(core := Core(), 1)
    for token_id in ids("ab") * MAX_AT_ONCE:
        core.sinks[0].on_token(token_id, None)
    core.sinks[0].on_error(WireError(ErrorCode.WORKER_LOST, "gone"))
    shown, wakes = "", 0
    while writer.wakes > wakes:
        assert not subject.is_over
        wakes = writer.wakes
        for _, pieces in subject.take():
            shown += "".join(piece.text for piece in pieces)
    assert shown == "ab" * MAX_AT_ONCE
    assert subject.is_over and subject.outcome == "worker_lost"


def test_a_turn_has_a_bound_however_many_choices_there_are() -> None:
    subject, _ = started(core := Core(), 3)
    for sink in core.sinks:
        for token_id in ids("a") * (MAX_AT_ONCE // 2 + 1):
            sink.on_token(token_id, None)
    assert sum(len(pieces) for _, pieces in subject.take()) == MAX_AT_ONCE


@given(
    st.lists(st.sampled_from(["0 says", "1 says", "1 says all", "0 ends", "takes"]), max_size=40),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_no_token_is_left_though_only_the_first_wakes(
    moments: list[str], is_plain: bool, count: int
) -> None:
    """Whenever a writer that is awake takes, at once or late: nothing waits that it is not told."""
    subject, writer = started(core := Core(), count, stop=None if is_plain else "~")
    said, shown, num_wakes = ["", ""], ["", ""], 0
    running = set(range(count))

    def take() -> bool:
        nonlocal num_wakes
        if writer.wakes == num_wakes:
            return False  # it sleeps
        num_wakes = writer.wakes
        for choice, pieces in subject.take():
            shown[choice.index] += "".join(piece.text for piece in pieces)
        return True

    def end(index: int) -> None:
        running.remove(index)
        core.sinks[index].on_done(Usage(finish_reason="length"))

    for moment in moments:
        who, _, what = moment.partition(" ")
        if what and int(who) in running and what == "ends":
            end(int(who))
        elif what and int(who) in running:
            text = "日é" * (2 * MAX_AT_ONCE if what == "says all" else 1)
            said[int(who)] += text
            say(core.sinks[int(who)], text)
        else:
            take()
    while take():
        pass
    assert shown == said
    for index in tuple(running):
        end(index)
    while take():
        pass
    assert subject.is_over and shown == said


def test_what_a_completion_came_to() -> None:
    core = Core()
    subject, _ = started(core, 1)
    core.sinks[0].on_prefill(PrefillResult(token_id=5, cached_tokens=2), 0)
    core.sinks[0].on_end(
        ended(
            "length",
            prompt_tokens=3,
            cached_tokens=2,
            completion_tokens=1,
            kv_bytes=64,
            queue_s=None,
            num_attempts=2,
        )
    )
    core.sinks[0].on_done(Usage(finish_reason="length", kv_bytes=64))
    subject.take()
    assert subject.outcome == "length"
    assert subject.facts == {
        "choices": 1,
        "attempts": 2,
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "completion_tokens": 1,
        "kv_bytes": 64,
        "kv_skipped_tokens": 0,
    }
