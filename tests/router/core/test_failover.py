"""Attempts that fail and are followed by others: nothing is lost, doubled or tried too often."""

from __future__ import annotations

import pytest

from router.core.failover import PER_S, RetryBudget, given_up, pause_s
from router.core.replies import SENTENCES
from router.core.request import Request
from router.core.state import Limits, Phase
from tests.router.core.states import state
from tests.router.scripted import RecordingSink, Router, first, load, usage
from wire.errors import ErrorCode, PeerLost, WireError
from wire.frames import (
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Error,
    PrefillDone,
    PrefillRequest,
    Role,
    Tag,
)
from wire.options import Options
from wire.payloads import ErrorDetail, decode_continuation, decode_prompt, encode_map

P, D = b"prefill-0-1", b"decode-0-1"
P1, D1 = b"prefill-1-1", b"decode-1-1"


@pytest.fixture
def router() -> Router:
    """Two workers of each role."""
    made = Router(Limits())
    for rank in (0, 1):
        made.join(Role.PREFILL, rank)
        made.join(Role.DECODE, rank)
    made.sent.clear()
    return made


def asked(router: Router) -> tuple[bytes, PrefillRequest, tuple[int, ...], Options]:
    """The one PREFILL_REQUEST that was sent since."""
    [(peer, message)] = router.take(Tag.PREFILL_REQUEST)
    frame = message.frame
    assert isinstance(frame, PrefillRequest)
    return peer, frame, *decode_prompt(message.body(), frame.seq_len)


def tokens(sink: RecordingSink) -> list[object]:
    return [what for kind, what in sink.events if kind == "token"]


def test_a_decode_worker_lost_in_the_middle_is_followed_by_another(router: Router) -> None:
    _, sink = router.submit(20, new=5, seed=7, min_tokens=4)
    _, frame, _, _ = asked(router)
    router.say(P, PrefillDone(frame.request_id, 0), first(100))
    router.say(D, [DecodeToken(frame.request_id, 101)])
    router.say(D, [DecodeToken(frame.request_id, 102)])
    router.bus.on_lost(D)

    peer, again, token_ids, options = asked(router)
    assert peer == P and again.decode_rank == 1 and again.request_id != frame.request_id
    assert token_ids == (*range(20), 100, 101, 102)
    assert options == Options(seed=7, min_tokens=4, max_tokens=6, generated_tokens=3, timeline=True)
    router.say(D, [DecodeToken(frame.request_id, 666)])  # Of the attempt that is over.

    router.say(P, PrefillDone(again.request_id, 0), first(103))
    [(peer, message)] = [each for each in router.take(Tag.DECODE_REQUEST) if each[0] == D1]
    assert message.frame == DecodeRequest(again.request_id, 2)
    assert decode_continuation(message.body()) == ((*range(20), 100, 101, 102, 103), options)
    for token_id in (104, 105):
        router.say(D1, [DecodeToken(again.request_id, token_id)])
    router.say(D1, DecodeDone(again.request_id), usage())

    assert sink.kinds == ["prefill", *["token"] * 5, "done"]
    assert tokens(sink) == [101, 102, 103, 104, 105]
    assert sink.usage.completion_tokens == 6
    assert [end.num_attempts for end in router.ends.ends] == [2]
    assert router.dispatcher.failovers == {"worker_lost": 1}
    router.assert_idle()


def test_the_next_worker_may_send_what_is_left_and_no_more(router: Router) -> None:
    _, sink = router.submit(new=3)
    request_id = router.prefill_id()
    router.say(P, PrefillDone(request_id, 0), first(100))
    router.say(D, [DecodeToken(request_id, 101)])
    router.bus.on_lost(D)
    peer, again, _, _ = asked(router)
    router.say(peer, PrefillDone(again.request_id, 0), first(102))
    router.say(D1, [DecodeToken(again.request_id, token_id) for token_id in range(103, 107)])
    assert tokens(sink) == [101, 102, 103]
    assert (sink.usage.completion_tokens, sink.usage.finish_reason) == (4, "length")
    assert router.dispatcher.dropped == {"protocol": 1, "unknown_request": 2}
    router.assert_idle()


def test_a_worker_that_failed_is_avoided_and_given_a_pause(router: Router) -> None:
    _, sink = router.submit()
    failure = encode_map(ErrorDetail(message="a broken device"))
    router.say(P, Error(router.prefill_id(), ErrorCode.INTERNAL), failure)
    assert router.dispatcher.num_waiting == 1 and router.take(Tag.PREFILL_REQUEST) == []
    router.now += 0.1
    router.dispatcher.tick()
    peer, frame, _, _ = asked(router)
    assert peer == P1
    router.say(P1, Error(frame.request_id, ErrorCode.TRANSFER_FAILED), failure)
    router.now += 0.2
    router.dispatcher.tick()
    peer, frame, _, _ = asked(router)
    # Both prefill workers failed it, so either will do; the other end of the transfer will not.
    assert frame.decode_rank == 1
    assert sink.events == []


def test_a_request_goes_on_where_its_numbers_are_rounded_alike() -> None:
    router = Router(Limits())
    for rank, (arithmetic, num_blocks) in enumerate((("y", 65), ("x", 64), ("x", 66))):
        router.join(Role.PREFILL, rank, arithmetic=arithmetic)
        router.join(Role.DECODE, rank, arithmetic=arithmetic, num_blocks=num_blocks)
    router.sent.clear()
    router.submit(20)
    _, frame, _, _ = asked(router)
    assert frame.decode_rank == 2  # the most free blocks
    router.bus.on_lost(b"decode-2-1")
    peer, frame, _, _ = asked(router)
    assert (peer, frame.decode_rank) == (b"prefill-1-1", 1)


def test_attempts_are_bounded_and_the_error_says_so(router: Router) -> None:
    _, sink = router.submit()
    failure = encode_map(ErrorDetail(message="a broken device"))
    for attempt in range(Limits().max_attempts):
        peer, frame, _, _ = asked(router)
        router.say(peer, Error(frame.request_id, ErrorCode.INTERNAL), failure)
        router.now += 0.1 * 2**attempt
        router.dispatcher.tick()
    assert sink.error.code is ErrorCode.INTERNAL
    assert "the worker failed (prefill-" in sink.error.message
    assert "broken device" not in sink.error.message, "its words are not for the client"
    assert "attempt 4 failed, no more are made" in sink.error.message
    router.assert_idle()


@pytest.mark.parametrize(
    "code", [ErrorCode.INVALID_REQUEST, ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.MODEL_FAILED]
)
def test_errors_of_the_request_are_not_retried(router: Router, code: ErrorCode) -> None:
    _, sink = router.submit()
    router.say(P, Error(router.prefill_id(), code), encode_map(ErrorDetail(message="no")))
    assert (sink.error.code, sink.error.message) == (code, SENTENCES[code])
    assert router.take(Tag.PREFILL_REQUEST) == []


def test_without_a_worker_it_waits_for_one_to_come_back() -> None:
    router = Router(Limits())
    router.pair()
    _, sink = router.submit()
    router.bus.on_lost(D)
    other, _ = router.submit()  # Somebody will restart it: not refused yet.
    assert router.dispatcher.num_waiting == 2
    router.dispatcher.cancel(other)
    router.take(Tag.PREFILL_REQUEST)
    router.join(Role.DECODE, 0, epoch=2)
    assert asked(router)[1].decode_rank == 0
    router.bus.on_lost(b"decode-0-2")
    router.dispatcher.tick()
    router.now += 31
    router.dispatcher.tick()
    assert sink.error.code is ErrorCode.WORKER_LOST
    assert "lost decode-0 (attempt 2 failed, no worker had room for another)" == sink.error.message
    with pytest.raises(WireError, match="no worker that can decode"):
        router.submit()
    router.assert_idle()


def test_a_worker_that_stands_still_is_left_and_told(router: Router) -> None:
    _, sink = router.submit()
    request_id = router.prefill_id()
    router.beat(P, load(step_ms=61_000))
    peer, frame, _, _ = asked(router)
    assert peer == P1 and sink.events == []
    assert {peer for peer, _ in router.take(Tag.CANCEL)} == {P, D}
    router.say(P, PrefillDone(request_id, 0), first(6))
    assert router.dispatcher.dropped == {"unknown_request": 1}
    router.beat(P, load(step_ms=62_000))  # Said once.
    assert router.take(Tag.CANCEL) == []
    router.bus.on_lost(P1)
    assert router.dispatcher.num_waiting == 1
    router.beat(P, load())
    assert asked(router)[0] == P
    assert router.dispatcher.attempts.get(frame.request_id) is None


def test_a_budget_is_earned_by_requests_and_by_time_and_is_bounded() -> None:
    budget = RetryBudget(2, now=0.0)
    assert [budget.spend(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(6):
        budget.earn()
    assert [budget.spend(0.0) for _ in range(2)] == [True, False]
    assert budget.spend(1 / PER_S + 0.01)
    assert [budget.spend(1000.0) for _ in range(3)] == [True, True, False]


def test_pauses_double_and_a_lost_worker_needs_none() -> None:
    it = state(Request((1,), Options()), Phase.PREFILL)
    broken = WireError(ErrorCode.INTERNAL, "x")
    pauses = []
    for it.num_attempts in (1, 2, 3):
        pauses.append(pause_s(it, broken))
    assert pauses == [0.1, 0.2, 0.4] and pause_s(it, PeerLost("decode-0")) == 0.0
    it.num_attempts = 1
    assert given_up(it, broken, "") is broken
