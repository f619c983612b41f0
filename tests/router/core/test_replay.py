"""Requests kept for replays, the workers a replay may use, and the comparison of tokens."""

from __future__ import annotations

import msgspec
import pytest

from router.core.replay import (
    Comparison,
    KeptRequest,
    UsedPair,
    UsedWorker,
    kept_requests,
    workers_to_exclude,
)
from router.core.request import Request
from router.core.state import Limits
from tests.router.scripted import RecordingSink, Router, first, usage
from wire.errors import ErrorCode, WireError
from wire.frames import DecodeDone, DecodeToken, PrefillDone, PrefillRequest, Role, Tag
from wire.options import Options
from wire.payloads import decode_prompt

PROMPT = tuple(range(20))
READER, WRITER = UsedWorker("prefill-0", "hash"), UsedWorker("decode-0", "sick")


def router(keep: str = "all", **limits: object) -> Router:
    made = Router(Limits(max_attempts=1, keep_requests=frozenset([keep]), **limits))  # type: ignore[arg-type]
    made.join(Role.PREFILL)
    made.join(Role.DECODE, arithmetic="sick")
    made.sent.clear()
    return made


def begin(it: Router, client: str = "anna", name: str = "r", **options: object) -> tuple[int, int]:
    """A request whose first token is 7; return its handle and the id of its attempt."""
    request = Request(PROMPT, Options(**options), 9, client, name)  # type: ignore[arg-type]
    handle = it.dispatcher.submit(request, RecordingSink())
    attempt = it.prefill_id()
    it.say(b"prefill-0-1", PrefillDone(attempt, 0), first(7))
    return handle, attempt


def serve(it: Router, *tokens: int, reason: str = "stop", **how: object) -> None:
    _, attempt = begin(it, **how)  # type: ignore[arg-type]
    for token in tokens:
        it.say(b"decode-0-1", DecodeToken(attempt, token))
    it.say(b"decode-0-1", DecodeDone(attempt), usage(reason))


def kept(it: Router, name: str = "r") -> list[KeptRequest]:
    return kept_requests(it.dispatcher.history.find(name))


def test_a_request_is_kept_as_workers_got_it() -> None:
    it = router()
    serve(it, 8, 9, temperature=1.0, seed=5, deadline_ms=9000, priority=7, cache_salt="a")
    [found] = kept(it)
    assert found.answer == (7, 8, 9) and found.is_whole and found.outcome == "stop"
    assert found.pairs == (UsedPair(0, READER, WRITER),)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=KeptRequest) == found
    request = found.replay("ops", "v", "fresh", frozenset())
    assert (request.token_ids, request.client, request.name) == (PROMPT, "ops", "v")
    assert request.max_new_tokens == 3, "one more than there were shows whether EOS comes"
    options = request.options
    assert (options.temperature, options.seed, options.cache_salt) == (1.0, 5, "fresh")
    assert (options.priority, options.deadline_ms) == (-100, None)


@pytest.mark.parametrize(
    ("keep", "is_kept"), [("all", True), ("anna", True), ("ben", False), ("", False)]
)
def test_only_requests_of_these_clients_are_kept(keep: str, is_kept: bool) -> None:
    it = router(keep)
    serve(it)
    assert bool(kept(it)) == it.dispatcher.history.keeps("anna") == is_kept
    [record] = it.dispatcher.history.find("r")
    assert (record.options is None) == (not is_kept), "without the setting it costs no memory"


def test_what_is_kept_is_bounded_with_its_options() -> None:
    bias = tuple((number, 1.0) for number in range(100))
    it = router(max_record_bytes=2900)
    for name in ("r1", "r2", "r3"):
        serve(it, name=name, logit_bias=bias)
    assert [bool(kept(it, name)) for name in ("r1", "r2", "r3")] == [False, False, True]
    assert it.dispatcher.history.find("r1"), "only its tokens and options are dropped"


def test_a_cut_answer_is_kept_as_far_as_it_went_and_an_unread_prompt_is_not() -> None:
    it = router()
    for end, outcome in (
        (it.dispatcher.stop, "stop"),
        (it.dispatcher.cancel, "cancelled"),
    ):
        handle, attempt = begin(it, name=outcome)
        it.say(b"decode-0-1", DecodeToken(attempt, 8))
        assert kept(it, outcome) == [], "it runs"
        end(handle)
        [found] = kept(it, outcome)
        assert (found.answer, found.is_whole, found.outcome) == ((7, 8), False, outcome)
    request = Request(PROMPT, Options(), 9, "anna", "unread")
    it.dispatcher.cancel(it.dispatcher.submit(request, RecordingSink()))
    assert kept(it, "unread") == []


def a_request(*answer: int, is_whole: bool = True, outcome: str = "stop") -> KeptRequest:
    token_ids = b"".join(token.to_bytes(4, "little") for token in (5, *answer))
    pairs = (UsedPair(0, READER, WRITER),)
    return KeptRequest("anna", 1, token_ids, b"", outcome, is_whole, pairs)


@pytest.mark.parametrize(
    ("answer", "is_whole", "replayed", "is_ended", "expected"),
    [
        ((7, 8, 9), True, (7, 8, 9), True, None),
        ((7, 8, 9), True, (7, 6), False, (1, 8, 6)),
        ((7, 8, 9), True, (6,), False, (0, 7, 6)),
        ((7, 8, 9), True, (7, 8), True, (2, 9, None)),
        ((7, 8), True, (7, 8, 9), False, (2, None, 9)),
        ((7, 8), False, (7, 8), False, None),
        ((7, 8), False, (7,), True, (1, 8, None)),
        ((), True, (), True, None),
        ((), True, (7,), False, (0, None, 7)),
    ],
)
def test_the_first_token_that_differs(
    answer: tuple[int, ...],
    is_whole: bool,
    replayed: tuple[int, ...],
    is_ended: bool,
    expected: tuple[int, int | None, int | None] | None,
) -> None:
    over: list[bool] = []
    it = router()
    sink = Comparison(a_request(*answer, is_whole=is_whole), lambda: over.append(True))
    request = Request(PROMPT, Options(), 9, excluded=frozenset())
    handle = it.dispatcher.submit(request, sink)
    attempt = it.prefill_id()
    done = first(replayed[0] if replayed else 2, None if replayed else "stop")
    it.say(b"prefill-0-1", PrefillDone(attempt, 0), done)
    for token in replayed[1:]:
        assert not over
        it.say(b"decode-0-1", DecodeToken(attempt, token))
    if is_ended and replayed:
        assert not over
        it.say(b"decode-0-1", DecodeDone(attempt), usage("stop"))
    assert over
    it.dispatcher.cancel(handle)
    found = sink.result()
    assert found.equal == (expected is None)
    difference = found.first_difference
    assert found.tokens == (len(answer) if difference is None else difference.position)
    if difference is not None:
        tokens = difference.kept_token, difference.replayed_token
        assert (difference.position, *tokens) == expected
        source = WRITER if difference.position else READER
        assert difference.kept_by == difference.replayed_by == source
    it.assert_idle()


def test_each_token_is_of_the_attempt_that_generated_it() -> None:
    second = UsedPair(2, UsedWorker("prefill-1", "x"), UsedWorker("decode-1", "x"))
    failed = UsedPair(2, UsedWorker("prefill-9", "x"), UsedWorker("decode-9", "x"))
    alone = UsedPair(0, None, WRITER)
    for pairs, names in (
        ((UsedPair(0, READER, WRITER), failed, second), "prefill-0 decode-0 prefill-1 decode-1"),
        ((alone,), "decode-0 decode-0 decode-0 decode-0"),
        ((UsedPair(0, READER, None), second), "prefill-0 prefill-0 prefill-1 decode-1"),
    ):
        found = []
        for position in range(4):
            pair = [it for it in pairs if it.first_token <= position][-1]
            found.append(pair.source(position).worker)
        assert found == names.split()


@pytest.mark.parametrize(
    ("workers", "local_prefill", "excluded", "excluded_of_same"),
    [
        ("prefill-0 decode-0", False, None, ""),
        ("prefill-0 decode-0 decode-1", False, "decode-0", "decode-1"),
        ("prefill-0 decode-0 decode-1", True, "prefill-0 decode-0", "decode-1"),
        ("prefill-0 decode-0 prefill-1", False, None, "prefill-1"),
        ("prefill-0 decode-0 any-1", False, "prefill-0 decode-0", "any-1"),
        ("prefill-0", False, None, None),
    ],
)
def test_where_a_replay_may_run(
    workers: str, local_prefill: bool, excluded: str | None, excluded_of_same: str | None
) -> None:
    it = Router()
    for name in workers.split():
        role, rank = name.split("-")
        it.join(Role[role.upper()], int(rank), epoch=8)  # started again since
    for same_worker, names in ((False, excluded), (True, excluded_of_same)):
        found = workers_to_exclude(
            a_request(7, 8), it.fleet, local_prefill=local_prefill, same_worker=same_worker
        )
        expected = None if names is None else {f"{each}-8".encode() for each in names.split()}
        assert found == expected


def test_one_token_needs_no_decode_worker() -> None:
    it = Router()
    it.join(Role.PREFILL, 1)
    one = a_request(7, outcome="length")
    assert workers_to_exclude(one, it.fleet, local_prefill=False, same_worker=False) == frozenset()


def test_a_replay_avoids_workers_is_not_retried_and_leaves_no_tokens() -> None:
    it = Router(Limits(keep_requests=frozenset(["all"])))
    for rank in range(2):
        it.join(Role.PREFILL, rank)
        it.join(Role.DECODE, rank)
    it.sent.clear()
    sink = RecordingSink()
    excluded = frozenset([b"prefill-0-1", b"decode-0-1"])
    request = Request(PROMPT, Options(), 9, "anna", "r", excluded=excluded)
    it.dispatcher.submit(request, sink)
    [(peer, message)] = it.take(Tag.PREFILL_REQUEST)
    frame = message.frame
    assert isinstance(frame, PrefillRequest)
    assert (peer, frame.decode_rank) == (b"prefill-1-1", 1)
    assert decode_prompt(message.body(), frame.seq_len)[0] == PROMPT
    [record] = it.dispatcher.history.find("r")
    assert record.chain is None and record.options is None
    it.bus.on_lost(b"decode-1-1")
    assert sink.error.code is ErrorCode.WORKER_LOST
    it.assert_idle()


def test_a_replay_does_not_wait() -> None:
    """It would hold up requests that other workers have room for."""
    it = router()
    request = Request(PROMPT, Options(), 9, excluded=frozenset([b"decode-0-1"]))
    with pytest.raises(WireError, match="does not wait") as caught:
        it.dispatcher.submit(request, RecordingSink())
    assert caught.value.code is ErrorCode.OVERLOADED
    it.assert_idle()
