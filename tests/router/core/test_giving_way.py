"""Preemption in the queue: ends, waits and yields; `test_dispatcher.py` has random events."""

from __future__ import annotations

import pytest

from router.core.dispatcher import HOLD_GRACE_S
from router.core.fleet import WorkerState
from router.core.request import Request
from router.core.state import Limits
from tests.router.scripted import RecordingSink, Router, first, load, usage
from wire.errors import ErrorCode, WireError
from wire.frames import DecodeDone, Drain, Error, PrefillDone, Role, Tag
from wire.options import Options
from wire.payloads import Usage

P, D = b"prefill-0-1", b"decode-0-1"


def test_only_the_first_end_counts() -> None:
    router = Router()
    router.pair()
    handle, sink = router.submit()
    request_id = router.prefill_id()
    router.say(P, PrefillDone(request_id, 0), first(7, "stop"))
    router.say(D, DecodeDone(request_id), usage())
    router.say(P, Error(request_id, ErrorCode.INTERNAL))
    router.dispatcher.cancel(handle)
    router.dispatcher.stop(handle)
    assert sink.kinds == ["prefill", "done"] and len(router.ends.ends) == 1
    router.assert_idle()


class DeafSink(RecordingSink):
    def on_done(self, usage: Usage) -> None:
        raise RuntimeError

    def on_error(self, error: WireError) -> None:
        raise RuntimeError


def test_a_sink_that_raises_at_the_end_harms_no_one() -> None:
    router = Router()
    router.pair()
    for _ in range(2):
        router.dispatcher.submit(Request(tuple(range(20)), Options(), 5, ""), DeafSink())
    (_, one), (_, other) = router.take(Tag.PREFILL_REQUEST)
    router.say(P, PrefillDone(one.frame.request_id, 0), first(7, "stop"))  # type: ignore[attr-defined]
    router.say(P, Error(other.frame.request_id, ErrorCode.INTERNAL))  # type: ignore[attr-defined]
    assert [each.outcome for each in router.ends.ends] == ["stop", "internal"]
    router.assert_idle()


def test_a_waiting_request_that_ends_leaves_the_queue() -> None:
    router = Router()
    router.pair()
    router.beat(D, load(64, used=64))
    handle, _ = router.submit()
    assert router.dispatcher.num_waiting == 1
    router.dispatcher.cancel(handle)
    router.assert_idle()
    router.beat(D, load(64))
    assert router.take(Tag.PREFILL_REQUEST) == [] and router.take(Tag.CANCEL) == []


def test_a_worker_that_joins_gets_what_waits() -> None:
    router = Router()
    router.pair()
    router.beat(D, load(64, used=64))
    router.submit()
    router.join(Role.DECODE, 1)
    [(_, message)] = router.take(Tag.PREFILL_REQUEST)
    assert message.frame.decode_rank == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("peer", [P, D])
@pytest.mark.parametrize("max_waiting", [0, 1])
def test_a_full_queue_says_so_when_it_is_a_worker_that_is_missing(
    peer: bytes, max_waiting: int
) -> None:
    router = Router(Limits(max_waiting=max_waiting, max_running_per_worker=1))
    router.pair()
    router.submit()
    for _ in range(max_waiting):
        router.submit()
    with pytest.raises(WireError) as full:
        router.submit()
    router.bus.lose(peer, "test")
    with pytest.raises(WireError) as missing:
        for _ in range(2):
            router.submit()
    assert (full.value.code, missing.value.code) == (ErrorCode.OVERLOADED, ErrorCode.NO_WORKER)
    assert peer.partition(b"-")[0].decode() in missing.value.message


def test_who_makes_room_hears_that_a_worker_is_missing() -> None:
    router = Router(Limits(max_waiting=2))
    router.pair()
    router.bus.lose(D, "test")
    sinks = []
    for client in ("greedy", "greedy", "other"):
        sinks.append(RecordingSink())
        router.dispatcher.submit(Request((1, 2), Options(), 5, client=client), sinks[-1])
    assert sinks[1].error.code is ErrorCode.NO_WORKER
    assert sinks[0].events == sinks[2].events == []


def prefilled(router: Router, count: int, client: str, prompt: int = 20) -> list[RecordingSink]:
    """Requests that are prefilled, and whose client says nothing more."""
    sinks = []
    for _ in range(count):
        sinks.append(router.submit(prompt, None, client, max_tokens=2)[1])
        router.say(P, PrefillDone(router.prefill_id(), 0), first())
    return sinks


def ended(sinks: list[RecordingSink]) -> list[int]:
    return [i for i, sink in enumerate(sinks) if sink.ends]


def test_what_is_held_without_being_asked_on_gives_way_after_its_grace() -> None:
    router = Router(Limits(max_running_per_worker=4))
    router.pair()
    hog = prefilled(router, 3, "hog")
    few = prefilled(router, 1, "few")
    _, waiting = router.submit(client="new")
    router.now += HOLD_GRACE_S * 0.9
    router.dispatcher.tick()
    assert ended(hog) == ended(few) == [] and router.take(Tag.PREFILL_REQUEST) == []
    router.now += HOLD_GRACE_S * 0.1
    router.dispatcher.tick()
    assert ended(hog) == [0], "the oldest of the client that holds most, and no more than needed"
    assert hog[0].error.code is ErrorCode.OVERLOADED and "DECODE_REQUEST" in hog[0].error.message
    assert {peer for peer, _ in router.take(Tag.CANCEL)} == {P, D}
    assert len(router.take(Tag.PREFILL_REQUEST)) == 1 and not waiting.events and not few[0].ends


def test_who_is_asked_on_gives_way_to_no_one() -> None:
    router = Router(Limits(max_running_per_worker=2))
    router.pair()
    handle, early = router.submit(new=None, client="hog")
    router.dispatcher.decode(handle, 3)  # Sent along with PREFILL_REQUEST.
    router.say(P, PrefillDone(router.prefill_id(), 0), first())
    handle, late = router.submit(new=None, client="hog")
    router.say(P, PrefillDone(router.prefill_id(), 0), first())
    router.dispatcher.decode(handle, 3)
    router.submit(client="new")
    router.now += 2 * HOLD_GRACE_S
    router.dispatcher.tick()
    assert early.ends == late.ends == [] and router.dispatcher.num_waiting == 1


def test_nothing_gives_way_while_there_is_room_or_where_it_would_not_help() -> None:
    router = Router(Limits(max_running_per_worker=2))
    router.pair()
    parked = prefilled(router, 1, "hog")
    router.now += 2 * HOLD_GRACE_S
    router.dispatcher.tick()
    assert not ended(parked)
    for _ in range(2):  # One is placed; the other waits for the decode worker.
        router.submit(client="new")
    router.fleet.get(P).state = WorkerState.SUSPECT  # type: ignore[union-attr]
    router.dispatcher.tick()
    assert not ended(parked), "it is the prefill worker that is missing"
    router.beat(P, load())
    router.dispatcher.tick()
    assert ended(parked) == [0]


def test_nothing_gives_way_while_the_prefill_worker_has_its_fill() -> None:
    router = Router(Limits(max_running_per_worker=2))
    router.pair()
    parked = prefilled(router, 2, "hog")
    for _ in range(2):
        router.submit(new=0)  # These need the prefill worker only.
    router.submit(client="new")
    router.now += HOLD_GRACE_S
    router.dispatcher.tick()
    assert not ended(parked) and router.dispatcher.num_waiting == 1


def test_room_for_all_but_the_first_token_is_enough() -> None:
    """The decode worker gets the first with the prompt: 20 and 12 tokens are 2 blocks."""
    router = Router()
    router.pair()
    parked = prefilled(router, 1, "hog", prompt=20)  # 2 blocks
    router.beat(D, load(64, used=64))
    router.submit(20, new=12, client="new")
    router.now += HOLD_GRACE_S
    router.dispatcher.tick()
    assert ended(parked) == [0]


def test_a_place_that_an_error_frees_is_taken_at_once() -> None:
    router = Router(Limits(max_running_per_worker=1))
    router.pair()
    handle, sink = router.submit(20, new=None)
    router.say(P, PrefillDone(router.prefill_id(), 0), first())
    router.submit(client="new")
    assert router.dispatcher.num_waiting == 1
    router.dispatcher.decode(handle, 5000)
    assert sink.error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert router.dispatcher.num_waiting == 0


def test_what_was_held_for_a_moment_only_counts_too() -> None:
    router = Router(Limits(max_running_per_worker=6))
    router.pair()
    big, small = prefilled(router, 1, "big"), prefilled(router, 2, "small")
    router.now += HOLD_GRACE_S
    more = prefilled(router, 3, "big")
    router.submit(client="new")
    router.dispatcher.tick()
    assert ended(big) == [0] and not ended(small) and not ended(more)


def test_what_runs_takes_no_place_in_the_queue() -> None:
    router = Router(Limits(max_running_per_worker=3, max_waiting=1))
    router.pair()
    sinks = [router.submit(client="busy")[1] for _ in range(4)]
    with pytest.raises(WireError) as caught:
        router.submit(client="new")
    assert caught.value.code is ErrorCode.OVERLOADED and not ended(sinks)


def test_clients_that_hold_as_much_give_way_in_turn() -> None:
    router = Router(Limits(max_running_per_worker=6))
    router.pair()
    big, small = prefilled(router, 4, "big"), prefilled(router, 2, "small")
    for _ in range(4):
        router.submit(client="new")
    router.now += HOLD_GRACE_S
    router.dispatcher.tick()
    assert len(ended(big)) == 3 and len(ended(small)) == 1
    assert len(router.take(Tag.PREFILL_REQUEST)) == 4


def test_blocks_that_are_on_their_way_back_are_not_asked_for_twice() -> None:
    """A decode worker's heartbeat shows late what a CANCEL has freed."""
    router = Router()
    router.pair()
    hog = prefilled(router, 4, "hog", prompt=250)  # 16 blocks each, of 64
    router.beat(D, load(64, used=64))
    router.submit(300, client="new")  # 20 blocks
    router.now += HOLD_GRACE_S
    for _ in range(3):
        router.dispatcher.tick()
    assert ended(hog) == [0, 1] and router.dispatcher.num_waiting == 1
    router.beat(D, load(64, used=32))
    assert router.dispatcher.num_waiting == 0
    router.submit(500, client="new")  # 32 blocks, of which 12 are free
    router.dispatcher.tick()
    assert ended(hog) == [0, 1, 2, 3], "the next one may ask again"


def test_what_is_held_counts_when_a_place_in_the_queue_is_given_up() -> None:
    router = Router(Limits(max_waiting=4, max_running_per_worker=3))
    router.pair()
    prefilled(router, 3, "hog")
    waiting = [router.submit(client=client)[1] for client in ("hog", "few", "few", "hog")]
    router.submit(client="new")
    assert ended(waiting) == [3], "2 wait for each, but 3 more are held for the hog"


def test_no_attempt_is_made_beyond_the_deadline_of_its_request() -> None:
    router = Router(Limits(max_attempts=2, queue_timeout_s=30.0, deadline_s=20.0))
    router.pair()
    router.join(Role.DECODE, 1)
    _, sink = router.submit()
    router.bus.lose(P, "test")
    assert router.dispatcher.num_waiting == 1 and not sink.ends
    router.now += 20.0
    router.dispatcher.tick()
    assert sink.error.code is ErrorCode.DEADLINE_EXCEEDED
    router.assert_idle()


def test_what_is_held_ends_with_its_own_deadline_too() -> None:
    router = Router(Limits(lease_s=30.0, deadline_s=20.0))
    router.pair()
    [sink] = prefilled(router, 1, "slow")
    router.now += 20.0
    router.dispatcher.tick()
    assert sink.error.code is ErrorCode.DEADLINE_EXCEEDED and "within 20 s" in sink.error.message


def test_blocks_that_are_only_promised_are_back_at_once() -> None:
    router = Router()
    router.pair()
    hog = prefilled(router, 4, "hog", prompt=250)  # 16 blocks each, of 64, and no heartbeat since
    router.submit(300, client="new")
    router.now += HOLD_GRACE_S
    router.dispatcher.tick()
    assert ended(hog) == [0, 1] and len(router.take(Tag.PREFILL_REQUEST)) == 1
    assert router.fleet.get(D).returning_blocks == 0  # type: ignore[union-attr]


def test_no_one_gives_way_on_a_worker_that_is_too_small() -> None:
    router = Router()
    router.join(Role.PREFILL)
    router.join(Role.DECODE, num_blocks=16)
    parked = prefilled(router, 1, "hog", prompt=250)
    router.beat(router.join(Role.DECODE, 1), load(64, used=64))
    router.submit(300, client="new")  # 20 blocks
    router.now += HOLD_GRACE_S
    router.dispatcher.tick()
    assert not ended(parked) and router.dispatcher.num_waiting == 1


def test_no_one_gives_way_on_a_worker_that_leaves() -> None:
    router = Router()
    router.join(Role.PREFILL)
    router.join(Role.DECODE)
    parked = prefilled(router, 1, "hog")
    router.say(D, Drain(1, 1000))
    router.beat(router.join(Role.DECODE, 1), load(64, used=64))
    router.submit(client="new")
    router.now += HOLD_GRACE_S
    router.dispatcher.tick()
    assert not ended(parked) and router.dispatcher.num_waiting == 1


def test_whoever_holds_most_after_each_step_gives_way_next() -> None:
    router = Router()
    router.pair()
    big, small = (prefilled(router, n, c, prompt=250) for n, c in ((3, "big"), (1, "small")))
    router.submit(760, client="new")  # 48 blocks, of 4 x 16
    router.now += HOLD_GRACE_S
    router.dispatcher.tick()
    assert ended(big) == [0, 1] and ended(small) == [0]


def test_a_new_request_does_not_pass_one_that_waits_for_more_room() -> None:
    router = Router()
    router.pair()
    router.beat(D, load(64, used=40))
    router.submit(500)  # 32 blocks, of which 24 are free
    router.submit(20)
    assert router.dispatcher.num_waiting == 2 and router.take(Tag.PREFILL_REQUEST) == []


def test_the_time_to_wait_is_not_the_time_to_be_read() -> None:
    router = Router(Limits(queue_timeout_s=30.0))
    router.pair()
    _, sink = router.submit()
    router.now += 31.0
    router.dispatcher.tick()
    assert not sink.ends and router.dispatcher.num_running == 1


def test_new_requests_earn_another_attempt() -> None:
    router = Router(Limits(retry_burst=1))
    router.pair()
    sinks = []
    for num_more in (0, 0, 6):  # The first may be tried again; the next only after some more.
        for _ in range(num_more):
            router.submit()
        router.take(Tag.PREFILL_REQUEST)
        sinks.append(router.submit()[1])
        router.say(P, Error(router.prefill_id(), ErrorCode.INTERNAL))
    assert [bool(sink.ends) for sink in sinks] == [False, True, False]
