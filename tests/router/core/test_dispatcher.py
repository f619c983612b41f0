"""The life of a request, with scripted workers and a clock that tests move."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.request import Request
from router.core.state import Limits
from tests.router.scripted import EPOCH, RecordingSink, Router, first, load, usage
from wire.errors import ErrorCode, TransferTooLarge, WireError
from wire.frames import (
    NO_RANK,
    Cancel,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Drain,
    Error,
    Frame,
    PrefillDone,
    PrefillRequest,
    Role,
    Tag,
)
from wire.options import Options
from wire.parts import Message, encode
from wire.payloads import (
    ErrorDetail,
    Logprobs,
    PrefillResult,
    decode_continuation,
    decode_prompt,
    encode_map,
)

P, D, ALONE = b"prefill-0-1", b"decode-0-1", b"decode-3-1"
TROUBLE = ["lost", "drain", "garbage", "beat", "beat", "beat"]


@pytest.fixture
def router() -> Router:
    made = Router()
    made.pair()
    made.sent.clear()
    return made


def cancels(router: Router) -> set[tuple[bytes, int]]:
    return {
        (peer, message.frame.code)
        for peer, message in router.take(Tag.CANCEL)
        if isinstance(message.frame, Cancel)
    }


def test_a_request_goes_through_both_workers_and_ends_once(router: Router) -> None:
    _, sink = router.submit(20, new=3, temperature=0.5)
    [(peer, message)] = router.take(Tag.PREFILL_REQUEST)
    frame = message.frame
    assert isinstance(frame, PrefillRequest) and peer == P
    assert (frame.seq_len, frame.decode_rank, frame.request_id >> 32) == (20, 0, EPOCH)
    token_ids, options = decode_prompt(message.body(), 20)
    assert token_ids == tuple(range(20))
    assert options == Options(temperature=0.5, max_tokens=4, timeline=True)

    router.say(P, PrefillDone(frame.request_id, 1280), first(7))
    [(peer, message)] = router.take(Tag.DECODE_REQUEST)
    assert peer == D and message.frame == DecodeRequest(frame.request_id, 3)
    assert decode_continuation(message.body()) == ((*range(20), 7), options)

    for token_id in (8, 9, 10):
        router.say(D, [DecodeToken(frame.request_id, token_id)])
    router.now += 2.0
    router.say(D, DecodeDone(frame.request_id), usage())

    assert sink.kinds == ["prefill", "token", "token", "token", "done"]
    assert sink.usage.completion_tokens == 4
    assert router.sent == []  # No CANCEL: both workers know that it is over.
    router.assert_idle()
    [end] = router.ends.ends
    assert (end.outcome, end.code, end.completion_tokens, end.total_s) == ("length", None, 4, 2.0)


def test_one_message_holds_the_tokens_of_many_requests(router: Router) -> None:
    sinks, ids = [], []
    for _ in range(3):
        sinks.append(router.submit(new=2, logprobs=0)[1])
        ids.append(router.prefill_id())
        router.say(P, PrefillDone(ids[-1], 0), first())
    logprobs = [Logprobs(logprob=-1.0), None, Logprobs(logprob=-3.0)]
    frames = [DecodeToken(request_id, 40 + i) for i, request_id in enumerate(ids)]
    router.say(D, frames, encode_map(logprobs))
    assert [sink.events[-1] for sink in sinks] == [("token", 40), ("token", 41), ("token", 42)]
    router.say(D, frames[:1], encode_map(logprobs[:2]))  # One too many: the worker is dropped.
    assert [sink.error.code for sink in sinks] == [ErrorCode.WORKER_LOST] * 3
    assert router.forgotten == [D]


@pytest.mark.parametrize("new", [0, None])
def test_one_token_needs_no_decode_worker(router: Router, new: int | None) -> None:
    router.bus.lose(D, "test")
    _, sink = router.submit(new=new, max_tokens=1)
    [(_, message)] = router.take(Tag.PREFILL_REQUEST)
    frame = message.frame
    assert isinstance(frame, PrefillRequest) and frame.decode_rank == NO_RANK
    router.say(P, PrefillDone(frame.request_id, 0), first(7, "length"))
    assert sink.kinds == ["prefill", "done"]
    assert (sink.usage.finish_reason, sink.usage.completion_tokens) == ("length", 1)
    assert router.take(Tag.CANCEL) == []
    router.assert_idle()


def test_a_tcp_client_says_later_how_many_tokens_it_wants(router: Router) -> None:
    handle, sink = router.submit(new=None)
    [(_, message)] = router.take(Tag.PREFILL_REQUEST)
    request_id = message.frame.request_id  # type: ignore[attr-defined]
    assert decode_prompt(message.body(), 20)[1].max_tokens is None
    router.say(P, PrefillDone(request_id, 0), first())
    assert sink.kinds == ["prefill"] and router.sent == []
    router.dispatcher.decode(handle, 4)
    router.dispatcher.decode(handle, 9)  # Said once.
    [(_, message)] = router.take(Tag.DECODE_REQUEST)
    assert message.frame == DecodeRequest(request_id, 4)
    assert decode_continuation(message.body())[1].max_tokens == 5


def test_a_pipelined_decode_request_is_kept_and_max_tokens_still_binds(router: Router) -> None:
    handle, _ = router.submit(new=None, max_tokens=3)
    router.dispatcher.decode(handle, 100)
    router.say(P, PrefillDone(request_id := router.prefill_id(), 0), first())
    [(_, message)] = router.take(Tag.DECODE_REQUEST)
    assert message.frame == DecodeRequest(request_id, 2)


def refused(router: Router, prompt: int = 20, **request: object) -> WireError:
    with pytest.raises(WireError) as caught:
        router.submit(prompt, **request)  # type: ignore[arg-type]
    assert router.take(Tag.PREFILL_REQUEST) == []
    router.assert_idle()
    return caught.value


def test_invalid_requests_are_refused_before_a_worker_sees_them(router: Router) -> None:
    assert refused(router, 0).code is ErrorCode.INVALID_REQUEST
    assert refused(router, 996).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert refused(router, 996, new=None, max_tokens=5).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert router.dispatcher.rejected == {"invalid_request": 1, "context_length_exceeded": 2}


def test_a_kv_cache_over_the_limit_is_refused_before_any_work() -> None:
    router = Router(max_kv_transfer_bytes=64 * 100)
    router.pair()
    error = refused(router, 101)
    assert isinstance(error, TransferTooLarge) and (error.size, error.limit) == (6464, 6400)
    router.submit(100)
    router.submit(101, new=0)  # Nothing to hand over.


def test_requests_wait_in_order_for_a_worker_with_room() -> None:
    router = Router(Limits(max_waiting=2, max_running_per_worker=1))
    router.pair()
    running, sink = router.submit(10)
    waiting = [router.submit(11)[0], router.submit(12)[0]]
    assert (router.dispatcher.num_running, router.dispatcher.num_waiting) == (1, 2)
    with pytest.raises(WireError) as caught:
        router.submit(13)
    assert caught.value.code is ErrorCode.OVERLOADED
    [(_, message)] = router.take(Tag.PREFILL_REQUEST)
    router.dispatcher.cancel(waiting[0])
    router.dispatcher.cancel(running)
    [(_, message)] = router.take(Tag.PREFILL_REQUEST)
    assert isinstance(message.frame, PrefillRequest) and message.frame.seq_len == 12
    assert sink.events == []


def test_waiting_ends_when_blocks_are_free_or_time_is_up() -> None:
    router = Router(Limits(queue_timeout_s=30))
    router.pair()
    router.beat(D, load(64, used=63))
    _, first_sink = router.submit()
    _, second_sink = router.submit(new=None, deadline_ms=5000)
    assert router.dispatcher.num_waiting == 2
    router.now += 6
    router.dispatcher.tick()
    assert second_sink.error.code is ErrorCode.DEADLINE_EXCEEDED
    router.now += 25
    router.dispatcher.tick()
    assert first_sink.error.code is ErrorCode.OVERLOADED
    _, third_sink = router.submit()
    router.beat(D, load(64, used=62))
    assert router.dispatcher.num_waiting == 0 and router.take(Tag.PREFILL_REQUEST)
    router.submit()
    router.bus.lose(D, "test")
    router.now += 31
    router.dispatcher.tick()
    assert third_sink.error.code is ErrorCode.WORKER_LOST
    assert router.ends.ends[-1].outcome == "no_worker"


def test_requests_wait_for_the_first_workers() -> None:
    router = Router()
    router.dispatcher.tick()
    _, sink = router.submit()
    router.now += 29
    router.dispatcher.tick()
    assert not sink.ends
    router.now += 2
    router.dispatcher.tick()
    assert sink.error.code is ErrorCode.NO_WORKER


def test_a_crowd_waits_for_its_turn_but_not_for_a_worker_that_is_gone() -> None:
    router = Router(Limits(max_running_per_worker=1))
    router.pair()
    router.submit()
    _, waiting = router.submit()
    for _ in range(5):
        router.now += 60
        router.dispatcher.tick()
    assert router.dispatcher.num_waiting == 1 and not waiting.ends
    router.bus.lose(D, "test")
    for _ in range(2):
        assert not waiting.ends
        router.now += 15
        router.dispatcher.tick()
    assert waiting.error.code is ErrorCode.NO_WORKER
    router.assert_idle()


def test_cancel_is_silent_and_frees_both_workers(router: Router) -> None:
    handle, sink = router.submit()
    request_id = router.prefill_id()
    router.dispatcher.cancel(handle)
    router.dispatcher.cancel(handle)
    assert cancels(router) == {(P, ErrorCode.CANCELLED), (D, ErrorCode.CANCELLED)}
    router.say(P, PrefillDone(request_id, 0), first())
    router.say(D, [DecodeToken(request_id, 3)])
    router.say(D, DecodeDone(request_id), usage())
    assert sink.events == []
    assert router.dispatcher.dropped == {"unknown_request": 3}
    assert [end.outcome for end in router.ends.ends] == ["cancelled"]
    router.assert_idle()


def test_a_client_that_has_all_it_asked_for_is_a_success(router: Router) -> None:
    handle, sink = router.submit()
    request_id = router.prefill_id()
    router.say(P, PrefillDone(request_id, 640), first())
    router.dispatcher.stop(handle)
    router.dispatcher.stop(handle)
    assert cancels(router) == {(P, ErrorCode.CANCELLED), (D, ErrorCode.CANCELLED)}
    assert sink.kinds == ["prefill"]
    [end] = router.ends.ends
    assert (end.outcome, end.code, end.completion_tokens, end.kv_bytes) == ("stop", None, 1, 640)
    router.assert_idle()


def test_frames_of_another_worker_change_nothing(router: Router) -> None:
    prefill, decode = router.join(Role.PREFILL, 1), router.join(Role.DECODE, 1)
    _, sink = router.submit()
    request_id = router.prefill_id()
    router.say(prefill, PrefillDone(request_id, 0), first())
    router.say(decode, [DecodeToken(request_id, 3)])
    router.say(decode, Error(request_id, 1), encode_map(ErrorDetail(message="x")))
    router.say(decode, DecodeDone(request_id), usage())
    assert sink.events == [] and router.dispatcher.dropped == {"wrong_worker": 4}
    assert router.dispatcher.num_running == 1 and router.forgotten == []


def served_alone() -> tuple[Router, RecordingSink, int]:
    """A request on the only worker, a decode worker that reads prompts."""
    router = Router(Limits(local_prefill=True))
    router.join(Role.DECODE, 3)
    router.sent.clear()
    _, sink = router.submit(20, new=3)
    [(peer, message)] = router.take(Tag.PREFILL_REQUEST)
    frame = message.frame
    assert isinstance(frame, PrefillRequest) and (peer, frame.decode_rank) == (ALONE, 3)
    assert decode_prompt(message.body(), 20)[1].max_tokens == 4
    return router, sink, frame.request_id


def test_a_decode_worker_serves_a_request_alone() -> None:
    router, sink, request_id = served_alone()
    router.say(ALONE, PrefillDone(request_id, 0), first(7))
    for token_id in (8, 9, 10):
        router.say(ALONE, [DecodeToken(request_id, token_id)])
    router.say(ALONE, DecodeDone(request_id), usage())
    assert sink.kinds == ["prefill", "token", "token", "token", "done"]
    assert router.sent == []  # neither DECODE_REQUEST nor CANCEL
    assert [end.local_reasons for end in router.ends.ends] == [("no_prefill_worker",)]
    router.assert_idle()


def test_the_first_token_of_a_worker_alone_may_be_its_last() -> None:
    router, sink, request_id = served_alone()
    router.say(ALONE, PrefillDone(request_id, 0), first(7, "stop"))
    assert sink.kinds == ["prefill", "done"] and router.sent == []
    router.assert_idle()


@pytest.mark.parametrize("is_read", [False, True])
def test_a_request_of_a_worker_alone_is_cancelled_there(is_read: bool) -> None:
    router, _, request_id = served_alone()
    if is_read:
        router.say(ALONE, PrefillDone(request_id, 0), first(7))
    router.dispatcher.cancel_all(ErrorCode.DRAINING, "enough")
    assert cancels(router) == {(ALONE, ErrorCode.DRAINING)} and router.sent == []
    router.assert_idle()


def test_what_a_worker_did_alone_goes_on_with_two() -> None:
    router = Router(Limits(local_prefill=True, max_attempts=2))
    router.join(Role.DECODE, 3)
    _, sink = router.submit(20, new=3)
    request_id = router.prefill_id()
    router.say(ALONE, PrefillDone(request_id, 0), first(7))
    router.say(ALONE, [DecodeToken(request_id, 8)])
    router.bus.on_lost(ALONE)
    for peer in router.pair():
        router.fleet.get(peer).token_s = 1.0 if peer == D else 0.0  # type: ignore[union-attr]
    router.dispatcher.tick()
    [(peer, message)] = router.take(Tag.PREFILL_REQUEST)
    assert (peer, message.frame.decode_rank) == (P, 0)  # type: ignore[attr-defined]
    token_ids, options = decode_prompt(message.body(), 22)
    assert token_ids[-2:] == (7, 8) and options.generated_tokens == 2
    request_id = message.frame.request_id  # type: ignore[attr-defined]
    router.say(P, PrefillDone(request_id, 1280), first(9))
    [(_, message)] = router.take(Tag.DECODE_REQUEST)
    assert message.frame == DecodeRequest(request_id, 1)
    router.say(D, [DecodeToken(request_id, 10)])
    router.say(D, DecodeDone(request_id), usage())
    assert sink.kinds == ["prefill", "token", "token", "token", "done"]
    router.assert_idle()


@pytest.mark.parametrize("role", [Role.DECODE, Role.ANY])
def test_raw_tcp_gets_its_first_token_before_it_says_how_many_it_wants(role: Role) -> None:
    router = Router(Limits(local_prefill=True, max_attempts=1))
    worker = router.join(role, 3)
    handle, sink = router.submit(20, new=None)
    [(peer, message)] = router.take(Tag.PREFILL_REQUEST)
    assert isinstance(message.frame, PrefillRequest)
    assert (peer, message.frame.decode_rank) == (worker, NO_RANK)
    router.say(worker, PrefillDone(message.frame.request_id, 0), first(7, "length"))
    assert sink.kinds == ["prefill"] and not router.dispatcher.attempts
    assert (router.dispatcher.num_running, router.dispatcher.num_waiting) == (1, 0)
    result = sink.events[0][1]
    assert isinstance(result, PrefillResult) and result.finish_reason is None, "it goes on"
    router.dispatcher.decode(handle, 2)
    [(_, message)] = router.take(Tag.PREFILL_REQUEST)
    assert isinstance(message.frame, PrefillRequest)
    assert message.frame.decode_rank == 3
    assert decode_prompt(message.body(), 21)[0][-1] == 7
    router.say(worker, PrefillDone(message.frame.request_id, 0), first(8))
    router.say(worker, [DecodeToken(message.frame.request_id, 9)])
    router.say(worker, DecodeDone(message.frame.request_id), usage())
    assert sink.kinds == ["prefill", "token", "token", "done"]
    assert sink.books[0].num_attempts == 1, "the first token alone takes none from later retries"
    router.assert_idle()


def test_a_decode_worker_tells_nothing_of_a_prompt_that_another_reads(router: Router) -> None:
    _, sink = router.submit()
    router.say(D, PrefillDone(router.prefill_id(), 0), first())
    assert router.dispatcher.dropped == {"wrong_worker": 1} and not sink.events


def test_frames_out_of_turn_end_the_request(router: Router) -> None:
    for frame, payload in ((DecodeDone, usage()), (lambda i: [DecodeToken(i, 3)], b"")):
        _, sink = router.submit()
        parts = encode(frame(router.prefill_id()), *([payload] if payload else []))
        router.bus.on_message(D, parts)
        assert sink.error.code is ErrorCode.INTERNAL and "decode-0 broke" in sink.error.message
    for payload in (first(), b"\xc1"):
        _, sink = router.submit()
        request_id = router.prefill_id()
        if payload != b"\xc1":
            router.say(P, PrefillDone(request_id, 0), payload)
        router.say(P, PrefillDone(request_id, 0), payload)
        assert sink.error.code is ErrorCode.INTERNAL
    router.assert_idle()


class RaisingSink(RecordingSink):
    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        raise RuntimeError("a bug in a face")


def test_a_sink_that_raises_costs_only_its_own_request(router: Router) -> None:
    router.dispatcher.submit(Request((1, 2), Options(), 3), RaisingSink())
    broken = router.prefill_id()
    _, sink = router.submit()
    healthy = router.prefill_id()
    for request_id in (broken, healthy):
        router.say(P, PrefillDone(request_id, 0), first())
    router.say(D, [DecodeToken(broken, 1), DecodeToken(healthy, 2)])
    assert sink.kinds == ["prefill", "token"]
    assert [end.outcome for end in router.ends.ends] == ["internal"]


def test_a_draining_worker_is_let_go_when_its_last_request_ends(router: Router) -> None:
    handle, _ = router.submit()
    router.say(D, Drain(1, 5000))
    assert router.take(Tag.DRAIN) == []
    router.submit()  # another worker may come soon
    assert router.dispatcher.num_waiting == 1
    router.dispatcher.cancel(handle)
    [(peer, message)] = router.take(Tag.DRAIN)
    assert peer == D and message.frame == Drain(1, 0)
    router.say(P, Drain(1, 5000))
    assert router.take(Tag.DRAIN) == [(P, Message(Drain(1, 0)))]


def test_a_draining_worker_hands_over_what_it_generates() -> None:
    router = Router(Limits(max_attempts=1))
    router.pair()
    _, sink = router.submit(20, new=3)
    request_id = router.prefill_id()
    router.say(P, PrefillDone(request_id, 1280), first(7))
    router.say(D, [DecodeToken(request_id, 8)])
    router.say(D, Drain(1, 5000))
    assert cancels(router) == set() and router.take(Tag.DRAIN) == []  # nobody else is there
    other = router.join(Role.DECODE, 1)
    router.fleet.get(P).prefill_since = 99.0  # type: ignore[union-attr]
    router.sent.clear()
    router.dispatcher.tick()
    assert cancels(router) == {(D, ErrorCode.CANCELLED)}
    [(peer, message)] = router.take(Tag.PREFILL_REQUEST)
    frame = message.frame
    assert isinstance(frame, PrefillRequest) and (peer, frame.decode_rank) == (D, 1)
    assert decode_prompt(message.body(), 22)[0][-2:] == (7, 8)
    router.say(D, PrefillDone(frame.request_id, 1280), first(9))
    router.say(other, [DecodeToken(frame.request_id, 10)])
    assert [peer for peer, _ in router.take(Tag.DRAIN)] == [D]
    router.say(other, DecodeDone(frame.request_id), usage())
    assert sink.kinds == ["prefill", "token", "token", "token", "done"]
    router.assert_idle()


def test_an_answer_without_a_place_does_not_keep_others_from_being_handed_over() -> None:
    router = Router()
    router.pair()
    for seq_len in (100, 20, 100, 20, 100, 20):
        router.submit(seq_len, new=3)
        router.say(P, PrefillDone(router.prefill_id(), 1280), first(7))
    router.join(Role.DECODE, 1, num_blocks=6)  # for three short answers, and no long one
    router.say(D, Drain(1, 5000))
    moved = [message.frame for _, message in router.take(Tag.PREFILL_REQUEST)]
    assert [(it.decode_rank, it.seq_len) for it in moved] == [(1, 21)] * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_draining_worker_keeps_what_it_does_not_generate(*, is_held: bool) -> None:
    """It has no KV of an answer to hand over."""
    router = Router()
    router.pair()
    router.join(Role.DECODE, 1)
    _, sink = router.submit(20, new=None)
    [(_, message)] = router.take(Tag.PREFILL_REQUEST)
    assert isinstance(message.frame, PrefillRequest)
    if is_held:
        router.say(P, PrefillDone(message.frame.request_id, 1280), first(7))
    router.say(f"decode-{message.frame.decode_rank}-1".encode(), Drain(1, 5000))
    router.dispatcher.tick()
    assert cancels(router) == set() and router.take(Tag.PREFILL_REQUEST) == []
    assert not sink.ends and router.dispatcher.num_running == 1


def test_an_answer_of_which_only_the_end_is_missing_is_not_handed_over() -> None:
    router = Router()
    router.pair()
    router.join(Role.DECODE, 1)
    _, sink = router.submit(20, new=1)
    [(_, message)] = router.take(Tag.PREFILL_REQUEST)
    frame = message.frame
    assert isinstance(frame, PrefillRequest)
    decode = f"decode-{frame.decode_rank}-1".encode()
    router.say(P, PrefillDone(frame.request_id, 1280), first(7))
    router.say(decode, [DecodeToken(frame.request_id, 8)])
    router.say(decode, Drain(1, 5000))
    router.dispatcher.tick()
    assert router.take(Tag.PREFILL_REQUEST) == []
    router.say(decode, DecodeDone(frame.request_id), usage())
    assert sink.kinds == ["prefill", "token", "done"]
    router.assert_idle()


class Interleavings(RuleBasedStateMachine):
    """Any order of client, worker and clock events, with ids that are right, stale or made up."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.sinks: list[RecordingSink] = []
        self.most: list[int] = []  # tokens that each asked for
        self.handles: list[int] = []
        self.refused = 0
        # Of every attempt: its request id and its two workers.
        self.attempts: list[tuple[int, bytes, bytes]] = [((EPOCH << 32) + 1, b"", b"")]
        self.peers: set[bytes] = set()
        self.epoch = 0

    @initialize(
        local_prefill=st.booleans(),
        max_attempts=st.sampled_from([1, 3]),
        roles=st.sampled_from([(Role.PREFILL, Role.DECODE), (Role.PREFILL, Role.ANY), (Role.ANY,)]),
    )
    def start(self, roles: tuple[Role, ...], max_attempts: int, *, local_prefill: bool) -> None:
        limits = Limits(
            max_waiting=3,
            max_running_per_worker=2,
            lease_s=5.0,
            max_attempts=max_attempts,
            local_prefill=local_prefill,
        )
        self.router = Router(limits)
        for role in roles:
            for rank in (0, 1):
                self.join(role, rank)

    @rule(role=st.sampled_from([Role.PREFILL, Role.DECODE, Role.ANY]), rank=st.integers(0, 1))
    def join(self, role: Role, rank: int) -> None:
        self.epoch += 1
        self.peers.add(self.router.join(role, rank, self.epoch))
        self.learn()

    @rule(
        prompt=st.integers(1, 300),
        new=st.sampled_from([0, 1, 2, None]),
        deadline_ms=st.sampled_from([None, 3000]),
    )
    def submit(self, prompt: int, new: int | None, deadline_ms: int | None) -> None:
        sink = RecordingSink()
        request = Request(tuple(range(prompt)), Options(deadline_ms=deadline_ms), new)
        try:
            self.handles.append(self.router.dispatcher.submit(request, sink))
        except WireError:
            assert sink.events == []
        else:
            self.sinks.append(sink)
            self.most.append(300 if new is None else new + 1)
        self.learn()

    @precondition(lambda self: self.handles)
    @rule(pick=st.integers(0, 100), new=st.integers(0, 3), is_cancel=st.booleans())
    def client(self, pick: int, new: int, is_cancel: bool) -> None:
        handle = self.handles[pick % len(self.handles)]
        if is_cancel:
            self.router.dispatcher.cancel(handle)
        else:
            self.router.dispatcher.decode(handle, new)
        self.learn()

    @rule(pick=st.integers(0, 3), tokens=st.integers(0, 3), end=st.sampled_from(["done", ""]))
    def honest_workers(self, pick: int, tokens: int, end: str) -> None:
        """The two workers of a recent attempt do their part, whether or not it is still wanted."""
        request_id, prefill, decode = self.attempts[-1 - pick % len(self.attempts)]
        self.router.say(prefill, PrefillDone(request_id, 9), first(1))
        for _ in range(tokens):
            self.router.say(decode, [DecodeToken(request_id, 5)])
        if end:
            self.router.say(decode, DecodeDone(request_id), usage())
        self.learn()

    @rule(
        by=st.sampled_from(["prefill", "decode", "other"]),
        pick=st.integers(0, 5),
        kind=st.sampled_from(["first", "stop", "token", "tokens", "done", "error"]),
    )
    def any_worker(self, by: str, pick: int, kind: str) -> None:
        """Any frame of a recent attempt, from one of its workers or from a stranger to it."""
        request_id, prefill, decode = self.attempts[-1 - pick % len(self.attempts)]
        other = sorted(self.peers)[pick % len(self.peers)]
        sender = {"prefill": prefill, "decode": decode, "other": other}[by]
        frames: Frame | list[DecodeToken]
        payload: list[bytes] = []
        match kind:
            case "first" | "stop":
                reason = "stop" if kind == "stop" else None
                frames, payload = PrefillDone(request_id, 9), [first(1, reason)]
            case "token":
                frames = [DecodeToken(request_id, 5)]
            case "tokens":
                frames = [DecodeToken(each[0], 5) for each in self.attempts[-3:]]
            case "done":
                frames, payload = DecodeDone(request_id), [usage()]
            case _:
                frames = Error(request_id, ErrorCode.INTERNAL)
                payload = [encode_map(ErrorDetail(message="x"))]
        self.router.say(sender, frames, *payload)
        self.learn()

    @precondition(lambda self: self.peers)
    @rule(peer=st.integers(0, 100), how=st.sampled_from(TROUBLE))
    def trouble(self, peer: int, how: str) -> None:
        sender = sorted(self.peers)[peer % len(self.peers)]
        match how:
            case "lost":
                self.router.bus.on_lost(sender)
            case "drain":
                self.router.say(sender, Drain(int(sender.rpartition(b"-")[2]), 1000))
            case "garbage":
                self.router.bus.on_message(sender, [b"nonsense"])
            case _:
                self.router.beat(sender, load())
        self.learn()

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def time(self, seconds: float) -> None:
        self.router.now += seconds
        self.router.bus.tick()
        self.learn()

    def learn(self) -> None:
        decodes = {
            worker.rank: worker.identity
            for worker in self.router.fleet.live
            if worker.can(Role.DECODE)
        }
        for peer, message in self.router.sent:
            frame = message.frame
            if isinstance(frame, PrefillRequest):
                assert frame.request_id not in [each[0] for each in self.attempts[1:]]
                decode = decodes.get(frame.decode_rank, b"none")
                self.attempts.append((frame.request_id, peer, decode))
        self.router.sent.clear()

    @invariant()
    def counts_agree(self) -> None:
        dispatcher = self.router.dispatcher
        num_open = len(self.sinks) - len(self.router.ends.ends)
        assert num_open == dispatcher.num_running + dispatcher.num_waiting
        for sink, most in zip(self.sinks, self.most, strict=True):
            assert len(sink.events) - len(sink.ends) <= most
        for each in self.router.fleet:
            assert each.num_active >= 0 and each.prefill_tokens >= 0
            assert each.promised_blocks == sum(each.promised.values()) >= 0
            assert set(each.promised) <= each.attempts

    @invariant()
    def workers_are_charged_for_their_attempts(self) -> None:
        attempts = self.router.dispatcher.attempts.values()
        for each in self.router.fleet:
            own = [it for it in attempts if each in (it.prefill, it.decode)]
            reading = [it for it in own if it.is_in_prefill and it.prefiller is each]
            num_decodes = sum(it.decode is each for it in own)
            assert each.attempts == {it.request_id for it in own}
            assert each.num_active == num_decodes + sum(it.prefill is each for it in reading)
            assert each.num_in_prefill == len(reading)
            assert each.prefill_tokens == sum(it.num_to_prefill for it in reading)
            if each.can(Role.DECODE):  # until its blocks are allocated
                assert {it.request_id for it in own if it.is_in_prefill} <= set(each.promised)

    def teardown(self) -> None:
        # Every request ends by its deadline at the latest, and exactly once.
        self.router.now += 700.0
        self.router.dispatcher.tick()
        assert len(self.router.ends.ends) == len(self.sinks)
        ended = [end for end in self.router.ends.ends if end.outcome != "cancelled"]
        assert sum(len(sink.ends) for sink in self.sinks) == len(ended)
        self.router.assert_idle()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=50, stateful_step_count=40)
