"""Held requests that give way, and the queue; random events are in `test_dispatcher.py`."""

from __future__ import annotations

import pytest

from router.core.fleet import WorkerState
from router.core.queue import HOLD_GRACE_S
from router.core.request import Request
from router.core.state import Limits
from tests.router.scripted import RecordingSink, Router, first, load
from wire.errors import ErrorCode, WireError
from wire.frames import Error, PrefillDone, Role, Tag
from wire.options import Options
from wire.payloads import Usage

P, D = b"prefill-0-1", b"decode-0-1"


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


def prefilled(router: Router, count: int, client: str, prompt: int = 20) -> list[RecordingSink]:
    """Requests that are prefilled, and whose client says nothing more."""
    sinks = []
    for _ in range(count):
        sinks.append(router.submit(prompt, None, client, max_tokens=2)[1])
        router.say(P, PrefillDone(router.prefill_id(), 0), first())
    return sinks


def ended(sinks: list[RecordingSink]) -> list[int]:
    return [i for i, sink in enumerate(sinks) if sink.ends]


def test_a_held_request_gives_way_after_its_grace() -> None:
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


def test_held_requests_give_way_where_all_workers_prefill_and_decode() -> None:
    """None has blocks for a prompt while the held requests have them."""
    router = Router()
    peers = [router.join(Role.ANY, rank) for rank in range(2)]
    held = []
    for _ in range(2):
        held.append(router.submit(500, None, "hog", max_tokens=2)[1])
        [(peer, message)] = router.take(Tag.PREFILL_REQUEST)
        router.say(peer, PrefillDone(message.frame.request_id, 0), first())  # type: ignore[attr-defined]
    for peer in peers:
        router.beat(peer, load(64, used=40))
    router.submit(500, client="new")
    router.now += HOLD_GRACE_S
    router.dispatcher.tick()
    assert ended(held) == [0]
    router.beat(peers[0], load())
    router.beat(peers[1], load())
    assert router.dispatcher.num_waiting == 0


def test_a_request_with_decode_request_does_not_give_way() -> None:
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


def test_requests_within_their_grace_count_for_their_client() -> None:
    router = Router(Limits(max_running_per_worker=6))
    router.pair()
    big, small = prefilled(router, 1, "big"), prefilled(router, 2, "small")
    router.now += HOLD_GRACE_S
    more = prefilled(router, 3, "big")
    router.submit(client="new")
    router.dispatcher.tick()
    assert ended(big) == [0] and not ended(small) and not ended(more)


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


def test_held_requests_count_when_the_queue_is_full() -> None:
    router = Router(Limits(max_waiting=4, max_running_per_worker=3))
    router.pair()
    prefilled(router, 3, "hog")
    waiting = [router.submit(client=client)[1] for client in ("hog", "few", "few", "hog")]
    router.submit(client="new")
    assert ended(waiting) == [3], "2 wait for each, but 3 more are held for the hog"


def test_no_request_gives_way_on_a_worker_that_is_too_small() -> None:
    router = Router()
    router.join(Role.PREFILL)
    router.join(Role.DECODE, num_blocks=16)
    parked = prefilled(router, 1, "hog", prompt=250)
    router.beat(router.join(Role.DECODE, 1), load(64, used=64))
    router.submit(300, client="new")  # 20 blocks
    router.now += HOLD_GRACE_S
    router.dispatcher.tick()
    assert not ended(parked) and router.dispatcher.num_waiting == 1


def test_a_new_request_does_not_pass_one_that_waits_for_more_room() -> None:
    router = Router()
    router.pair()
    router.beat(D, load(64, used=40))
    router.submit(500)  # 32 blocks, of which 24 are free
    router.submit(20)
    assert router.dispatcher.num_waiting == 2 and router.take(Tag.PREFILL_REQUEST) == []
