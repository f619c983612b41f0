"""A choice: tokens in, pieces out; held text, stop strings, the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.choice import Choice, OutputOptions, Piece
from router.text.stops import StopAutomaton
from router.text.tokenizer import Tokenizer
from tests.router.site import LETTERS, ids
from wire.errors import ErrorCode, WireError
from wire.logprobs import join_prompt_logprobs, pack_logprobs
from wire.payloads import Logprobs, PrefillResult, Usage

TOKENIZER = Tokenizer(LETTERS)


def choice(*stops: str, tokenizer: Tokenizer = TOKENIZER, **output: Any) -> Choice:
    automaton = StopAutomaton(stops) if stops else None
    return Choice(
        0,
        (1, 2, 3),
        OutputOptions(tokenizer=tokenizer, stops=automaton, **output),
        lambda choice: None,
    )


def say(target: Choice, text: str) -> None:
    for token_id in ids(text):
        target.on_token(token_id, None)


def done(target: Choice, reason: str = "stop") -> None:
    target.on_done(Usage(finish_reason=reason))


def texts(pieces: list[Piece]) -> list[tuple[str, str | None]]:
    return [(piece.text, piece.finish_reason) for piece in pieces]


def test_one_piece_a_token() -> None:
    subject = choice()
    say(subject, "abc")
    assert texts(subject.take()) == [("a", None), ("b", None), ("c", None)]
    assert subject.num_tokens == 3
    assert subject.take() == []


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_the_end_goes_out_with_the_last_token_if_it_is_there(stops: tuple[str, ...]) -> None:
    subject = choice(*stops)
    say(subject, "ab")
    done(subject, "length")
    assert texts(subject.take()) == [("a", None), ("b", "length")]
    assert subject.is_over


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_else_the_end_stands_alone(stops: tuple[str, ...]) -> None:
    subject = choice(*stops)
    say(subject, "a")
    subject.take()
    done(subject)
    assert texts(subject.take()) == [("", "stop")]
    assert subject.take() == []


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_half_a_character_waits_for_the_other_half(stops: tuple[str, ...]) -> None:
    subject = choice(*stops, has_ids=True)
    first, second = ids("é")
    subject.on_token(first, None)
    assert subject.take() == []
    subject.on_token(second, None)
    assert subject.take() == [Piece("é", [first, second], [])]


def test_half_a_character_at_the_end_is_shown_broken() -> None:
    subject = choice()
    subject.on_token(ids("é")[0], None)
    done(subject)
    assert texts(subject.take()) == [("\ufffd", "stop")]


def test_a_stop_string_across_tokens_ends_it() -> None:
    subject = choice("lo w")
    say(subject, "hello world")
    assert texts(subject.take())[-1] == ("l", "stop")
    assert subject.num_tokens == 7
    say(subject, "more")
    done(subject)
    assert subject.take() == []
    assert subject.usage is not None


def test_a_stop_string_alone_ends_with_an_empty_piece() -> None:
    subject = choice("ab")
    say(subject, "a")
    assert subject.take() == []
    say(subject, "b")
    assert texts(subject.take()) == [("", "stop")]


def test_what_was_held_for_a_stop_string_comes_at_the_end() -> None:
    subject = choice("</s>")
    say(subject, "x</")
    done(subject, "length")
    assert texts(subject.take()) == [("x</", "length")]


def test_stop_strings_wait_for_min_tokens() -> None:
    subject = choice("a", min_tokens=2)
    say(subject, "aaba")
    assert "".join(piece.text for piece in subject.take()) == "aab"
    assert subject.finish_reason == "stop"


def test_the_end_sign_as_first_token_is_no_text() -> None:
    subject = choice()
    subject.on_prefill(PrefillResult(token_id=1, cached_tokens=2, finish_reason="stop"), 0)
    done(subject)
    assert texts(subject.take()) == [("", "stop")]
    assert (subject.num_tokens, subject.cached_tokens) == (0, 2)


def test_the_first_token_comes_from_prefill() -> None:
    subject = choice()
    subject.on_prefill(PrefillResult(token_id=ids("h")[0], finish_reason="length"), 0)
    done(subject, "length")
    assert texts(subject.take()) == [("h", "length")]


def test_what_came_before_an_error_is_shown() -> None:
    subject = choice()
    say(subject, "ab")
    subject.on_error(WireError(ErrorCode.WORKER_LOST, "gone"))
    assert texts(subject.take()) == [("a", None), ("b", None)]
    assert subject.is_over


def test_without_a_tokenizer_every_token_is_an_empty_piece() -> None:
    subject = choice(tokenizer=Tokenizer(None), has_ids=True)
    for token_id in (7, 8):
        subject.on_token(token_id, None)
    assert subject.take() == [Piece("", [7], []), Piece("", [8], [])]


def test_scores_travel_with_the_text() -> None:
    subject = choice(has_logprobs=True)
    for token_id in ids("xé"):
        subject.on_token(token_id, Logprobs(logprob=-1.0))
    pieces = subject.take()
    assert [len(piece.scores) for piece in pieces] == [1, 2]
    assert [score.text_offset for piece in pieces for score in piece.scores] == [0, 1, 1]


def test_offsets_count_the_echoed_prompt() -> None:
    output = OutputOptions(tokenizer=TOKENIZER, has_logprobs=True)
    subject = Choice(0, (1,), output, lambda choice: None, prefix="abc")
    subject.on_token(ids("x")[0], None)
    assert subject.take()[0].scores[0].text_offset == 3


def test_nobody_is_woken_for_what_nobody_reads() -> None:
    woken: list[Choice] = []
    subject = Choice(0, (1,), OutputOptions(tokenizer=TOKENIZER, is_eager=False), woken.append)
    say(subject, "abc")
    assert woken == []
    done(subject)
    assert woken == [subject]
    assert "".join(piece.text for piece in subject.take()) == "abc"


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


def test_the_model_directory_of_these_tests_is_complete(tmp_path: Path) -> None:
    LETTERS.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).decode(ids("é!")) == "é!"


# What belongs to the prompt, and ends that are known at the first token.


def scored(*logprobs: float) -> bytes:
    rows = [Logprobs(logprob=value, top=((7, value),)) for value in logprobs]
    return join_prompt_logprobs(1, map(pack_logprobs, rows))


def echoing(*, is_echo_only: bool = False) -> Choice:
    output = OutputOptions(tokenizer=TOKENIZER, has_logprobs=True, is_echo_only=is_echo_only)
    return Choice(0, ids("abc"), output, lambda choice: None, prefix="abc")


def test_the_prompts_scores_come_with_the_first_piece() -> None:
    subject = echoing()
    first = PrefillResult(
        token_id=ids("d")[0], logprobs=Logprobs(logprob=-4.0), prompt_logprobs=scored(-2, -3)
    )
    subject.on_prefill(first, 0)
    [piece] = subject.take()
    logprobs = [score.logprobs and score.logprobs.logprob for score in piece.scores]
    assert logprobs == [None, -2, -3, -4]
    assert [score.text_offset for score in piece.scores] == [0, 1, 2, 3]
    assert [score.token_id for score in piece.scores] == ids("abcd")
    say(subject, "e")
    assert [len(piece.scores) for piece in subject.take()] == [1]


def test_an_echo_alone_has_no_token_of_its_own() -> None:
    subject = echoing(is_echo_only=True)
    result = PrefillResult(
        token_id=ids("d")[0], finish_reason="length", prompt_logprobs=scored(-2, -3)
    )
    subject.on_prefill(result, 0)
    done(subject, "length")
    [piece] = subject.take()
    assert (piece.text, piece.finish_reason, len(piece.scores)) == ("", "length", 3)
    assert subject.num_tokens == 0


@pytest.mark.parametrize("stop", [True, False])
def test_the_first_token_may_be_a_stop_string(stop: bool) -> None:
    subject = choice("d" if stop else "de")
    subject.on_prefill(PrefillResult(token_id=ids("d")[0]), 0)
    assert subject.is_stopped_at_once is stop
    assert texts(subject.take()) == ([("", "stop")] if stop else [])


def test_unless_there_must_be_more() -> None:
    subject = choice("d", min_tokens=1)
    subject.on_prefill(PrefillResult(token_id=ids("d")[0]), 0)
    assert not subject.is_stopped_at_once
