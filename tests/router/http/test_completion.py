"""An exchange: all choices or none, stop strings cancelled, errors end the rest."""

from __future__ import annotations

import pytest

from router.http import completion as module
from tests.router.http.scripted import Core, started
from tests.router.site import ids
from wire.errors import ErrorCode, WireError
from wire.payloads import PrefillResult, Usage


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


def test_over_when_every_choice_is() -> None:
    core = Core()
    subject, _ = started(core)
    for sink in core.sinks:
        assert not subject.is_over
        sink.on_done(Usage(finish_reason="stop"))
        subject.take()
    assert subject.is_over
    subject.cancel()
    assert core.cancelled == []


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


def test_a_writer_that_lags_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_TOKENS", 3)
    core = Core()
    _, writer = started(core)
    for token_id in ids("abcdef"):
        core.sinks[0].on_token(token_id, None)
    assert writer.overruns == 3


def test_usage_counts_a_prompt_once() -> None:
    core = Core()
    subject, _ = started(core, 4, per_prompt=2)
    for sink in core.sinks:
        sink.on_prefill(PrefillResult(token_id=ids("a")[0], cached_tokens=2), 64)
        sink.on_done(Usage(finish_reason="stop", kv_bytes=100, kv_skipped_tokens=1, kv_seconds=0.5))
    subject.take()
    usage = subject.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 4, 10)
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert usage.kv_transfer is not None
    assert (usage.kv_transfer.bytes, usage.kv_transfer.skipped_tokens) == (400, 4)
    assert subject.num_tokens == 4


def test_a_stop_in_the_first_token_is_cancelled_before_anyone_writes() -> None:
    core = Core()
    subject, _ = started(core, 2, stop="d")
    core.sinks[0].on_prefill(PrefillResult(token_id=ids("d")[0]), 0)
    assert core.stopped == [1], "the decode worker is not even asked"
    core.sinks[1].on_prefill(PrefillResult(token_id=ids("e")[0]), 0)
    [(stopped, pieces), _] = subject.take()
    assert (stopped.finish_reason, pieces[-1].text) == ("stop", "")
    assert (core.stopped, core.cancelled) == ([1], [])


def test_very_much_is_taken_in_parts_and_nothing_is_lost() -> None:
    """A client that reads again after a pause has thousands of tokens waiting, for each choice."""
    subject, writer = started(core := Core())
    tokens = ids("ab") * module.MAX_AT_ONCE
    for sink in core.sinks:
        for token_id in tokens:
            sink.on_token(token_id, None)
        sink.on_done(Usage(finish_reason="length"))
    texts, parts = ["", ""], 0
    while not subject.is_over:
        wakes = writer.wakes
        for choice, pieces in subject.take():
            texts[choice.index] += "".join(piece.text for piece in pieces)
        assert subject.num_new_tokens <= module.MAX_AT_ONCE
        assert subject.is_over or writer.wakes > wakes
        parts += 1
    assert texts == ["ab" * module.MAX_AT_ONCE] * 2 and parts == 4
    assert [choice.finish_reason for choice in subject.choices] == ["length"] * 2
    assert subject.take() == []


def test_a_stop_string_ends_a_choice_though_more_waits() -> None:
    subject, _ = started(core := Core(), 1, stop="b")
    for token_id in ids("ab") * module.MAX_AT_ONCE:
        core.sinks[0].on_token(token_id, None)
    [(_, pieces)] = subject.take()
    assert pieces[-1].finish_reason == "stop" and subject.is_over
    assert core.stopped == [1] and subject.take() == []
