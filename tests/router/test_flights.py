"""The table of open requests; its life under random events is in test_inflight."""

from __future__ import annotations

import pytest

from router.flight import Limits
from router.request import Request
from tests.router.scripted import RecordingSink, Router, load
from wire.errors import ErrorCode, WireError
from wire.frames import Role, Tag
from wire.options import Options
from wire.payloads import Usage

P, D = b"prefill-0-1", b"decode-0-1"


def test_only_the_first_end_counts() -> None:
    router = Router()
    router.pair()
    handle, sink = router.submit()
    flights = router.inflight._flights
    flight = flights.open[handle]
    flights.finish(flight, Usage(finish_reason="stop"))
    flights.fail(flight, WireError(ErrorCode.INTERNAL, "late"))
    flights.finish(flight, Usage(finish_reason="length"))
    assert not flights.end(flight, ErrorCode.CANCELLED)
    assert sink.kinds == ["done"] and len(router.ends.ends) == 1
    router.assert_idle()


class DeafSink(RecordingSink):
    def on_done(self, usage: Usage) -> None:
        raise RuntimeError

    def on_error(self, error: WireError) -> None:
        raise RuntimeError


def test_a_sink_that_raises_at_the_end_harms_no_one() -> None:
    router = Router()
    router.pair()
    flights = router.inflight._flights
    for end in ("finish", "fail"):
        handle, _ = router.submit()
        flight = flights.open[handle]
        flight.sink = DeafSink()
        if end == "finish":
            flights.finish(flight, Usage(finish_reason="stop"))
        else:
            flights.fail(flight, WireError(ErrorCode.INTERNAL, "x"))
    assert [each.outcome for each in router.ends.ends] == ["stop", "internal"]
    router.assert_idle()


def test_a_waiting_request_that_ends_leaves_the_queue() -> None:
    router = Router()
    router.pair()
    router.beat(D, load(64, used=64))
    handle, _ = router.submit()
    assert router.inflight.num_waiting == 1
    router.inflight.cancel(handle)
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
        router.inflight.submit(Request((1, 2), Options(), 5, client=client), sinks[-1])
    assert sinks[1].error.code is ErrorCode.NO_WORKER
    assert sinks[0].events == sinks[2].events == []
