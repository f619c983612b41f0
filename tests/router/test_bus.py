"""The router's end of the bus: by hand, and over real sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import structlog.testing

from router.bus import MAX_MESSAGE_BYTES
from router.core.fleet import MISSED_BEATS, WorkerState
from tests.router.scripted import Router, detail, load
from wire.errors import ErrorCode
from wire.frames import DecodeToken, Drain, DrainAsk, Error, Heartbeat, Hello, Role, Tag, Welcome
from wire.parts import Buffer, Message, encode
from wire.payloads import (
    ErrorDetail,
    Logprobs,
    PeerDetail,
    TierLoad,
    WelcomeDetail,
    decode_error,
    decode_map,
    encode_map,
)
from wire.prefix import prefix_hashes

P, D = b"prefill-0-1", b"decode-0-1"
# Longer than a worker that is alive is silent, and not so long that it is lost.
GONE_S = 2.1


def errors(router: Router) -> list[tuple[bytes, int, str]]:
    return [
        (peer, message.frame.code, decode_map(ErrorDetail, message.body()).message)
        for peer, message in router.take(Tag.ERROR)
        if isinstance(message.frame, Error)
    ]


def peer_lists(router: Router) -> list[tuple[bytes, list[int]]]:
    return [
        (peer, [each.epoch for each in decode_map(list[PeerDetail], message.body())])
        for peer, message in router.take(Tag.PEERS)
    ]


def test_a_worker_is_welcomed_and_told_the_settings_that_bind_it() -> None:
    router = Router()
    router.join(Role.PREFILL)
    [(peer, message)] = router.take(Tag.WELCOME)
    assert peer == P and message.frame == Welcome(0xABCD, 1000, 5000)
    assert decode_map(WelcomeDetail, message.body()).max_kv_transfer_bytes == 1 << 20


def test_all_workers_hear_of_every_change_of_decode_workers() -> None:
    router = Router()
    router.join(Role.PREFILL)
    assert peer_lists(router) == [(P, [])]
    router.join(Role.DECODE)
    assert peer_lists(router) == [(P, [1]), (D, [1])]
    router.join(Role.PREFILL, 1)
    assert peer_lists(router) == [(b"prefill-1-1", [1])]
    router.now += GONE_S
    router.join(Role.ANY, epoch=2)  # `any` and `decode` workers share ranks
    assert peer_lists(router)[-3:] == [(P, [2]), (b"prefill-1-1", [2]), (b"any-0-2", [2])]
    router.bus.on_lost(b"any-0-2")
    assert peer_lists(router) == [(P, []), (b"prefill-1-1", [])]


def test_an_unknown_peer_is_asked_for_hello() -> None:
    router = Router()
    router.beat(b"stranger", load())
    assert errors(router) == [(b"stranger", ErrorCode.UNKNOWN_PEER, "say HELLO first")]
    assert list(router.fleet) == []


def test_a_worker_cannot_use_another_identity() -> None:
    """As decode-1, whose identity the handshake has checked."""
    router = Router()
    router.pair()
    mine = router.join(Role.DECODE, 1)
    _, sink = router.submit()
    for hello in (
        Hello(9, 0, Role.DECODE),
        Hello(9, 0, Role.PREFILL),
        Hello(1, 2, Role.DECODE),
        Hello(2, 1, Role.DECODE),
    ):
        router.now += GONE_S  # so that nobody is kept by being alive
        router.say(mine, hello, encode_map(detail()))
        [(peer, code, _)] = errors(router)
        assert (peer, code, router.forgotten.pop()) == (mine, ErrorCode.PROTOCOL, mine)
        assert router.fleet.get(mine) is None, "it is dropped"
        assert router.fleet.get(P) is not None and router.fleet.get(D) is not None
        router.join(Role.DECODE, 1)
    router.say(mine, Drain(9, 0))
    assert errors(router)[0][1] == ErrorCode.PROTOCOL and router.fleet.get(mine) is None
    assert sink.ends == []


def test_a_worker_is_asked_to_drain_and_goes_on_until_it_does() -> None:
    router = Router()
    router.pair()
    worker = router.fleet.get(D)
    assert worker is not None
    router.bus.ask_to_drain(worker, DrainAsk.RESTART)
    assert router.take(Tag.DRAIN) == [(D, Message(Drain(1, 0, DrainAsk.RESTART)))]
    assert worker.is_ready
    router.say(D, Drain(1, 5000))
    assert worker.state is WorkerState.DRAINING
    assert router.take(Tag.DRAIN) == [(D, Message(Drain(1, 0)))]


def test_no_worker_asks_a_router_to_drain() -> None:
    router = Router()
    router.pair()
    router.say(D, Drain(1, 0, DrainAsk.LEAVE))
    assert errors(router)[0][1] == ErrorCode.PROTOCOL and router.fleet.get(D) is None


def test_all_workers_hear_of_a_successor() -> None:
    router = Router()
    router.pair()
    router.bus.announce_successor()
    assert router.take(Tag.DRAIN) == [(peer, Message(Drain(0xABCD, 0))) for peer in (P, D)]


def test_a_worker_that_drains_again_and_again_is_logged_once() -> None:
    router = Router()
    router.pair()
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            router.say(D, Drain(1, 5000))
    assert [line["event"] for line in lines] == ["worker drains"]


@pytest.mark.parametrize("parts", [[b""], [b"\x1e\0\0\0", b"short"], [b"\xff" * 4, b"0" * 16], []])
def test_a_worker_that_sends_garbage_is_forgotten(parts: list[Buffer]) -> None:
    router = Router()
    router.pair()
    _, sink = router.submit()
    router.bus.on_message(D, parts)
    assert router.forgotten == [D] and router.fleet.get(D) is None
    assert errors(router)[0][:2] == (D, ErrorCode.PROTOCOL)
    assert sink.error.code is ErrorCode.WORKER_LOST
    router.join(Role.DECODE)
    router.submit()


def test_a_message_that_would_be_long_to_read_is_not_read() -> None:
    router = Router()
    peer = router.join(Role.DECODE)
    scores = encode_map([Logprobs(logprob=-0.5)] * (MAX_MESSAGE_BYTES // 10))
    router.bus.on_message(peer, encode(DecodeToken(1, 5), scores))
    assert [(to, code) for to, code, _ in errors(router)] == [(peer, ErrorCode.PROTOCOL)]
    assert router.bus.fleet.get(peer) is None


def test_a_bad_heartbeat_or_hello_is_a_breach() -> None:
    router = Router()
    router.pair()
    router.say(D, Error(0, ErrorCode.INTERNAL), b"")  # which may say nothing
    router.say(D, Heartbeat(1, 0, 0), b"\xc1")
    router.say(P, Heartbeat(1, 0, 0))
    router.say(b"x", Hello(1, 5, Role.DECODE), b"\xc1")
    assert router.forgotten == [D, P, b"x"]


@pytest.mark.parametrize("version", [2, 4])
def test_another_version_is_a_mismatch_whatever_its_payload_is(version: int) -> None:
    router = Router()
    router.say(b"decode-0-1", Hello(1, 0, Role.DECODE, version), encode_map(load()))
    [(_, message)] = router.take(Tag.ERROR)
    assert message.frame == Error(0, ErrorCode.MISMATCH)
    reason = decode_error(message.body()).message
    assert reason.startswith(f"protocol version {version}, ") and "the same release" in reason
    assert not list(router.fleet) and not router.forgotten


def test_workers_that_compute_differently_are_warned_of_once() -> None:
    router = Router()
    with structlog.testing.capture_logs() as lines:
        router.join(Role.PREFILL, arithmetic="x")
        router.join(Role.DECODE, arithmetic="x")
        assert lines_about(lines) == []
        router.join(Role.DECODE, rank=1, arithmetic="y")
        router.bus.on_lost(b"decode-1-1")
        router.join(Role.DECODE, rank=1, epoch=2, arithmetic="y")
        assert lines_about(lines) == [["x", "y"]]
        router.join(Role.DECODE, rank=2, arithmetic="z")
        assert lines_about(lines) == [["x", "y"], ["x", "y", "z"]]


def lines_about(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [line["arithmetic"] for line in lines if line["event"].startswith("workers compute")]


def test_both_sides_beat_and_silence_is_noticed() -> None:
    router = Router()
    router.pair()
    _, sink = router.submit()
    router.bus.tick()
    beats = router.take(Tag.HEARTBEAT)
    assert {(peer, message.frame) for peer, message in beats} == {
        (P, Heartbeat(0, 1, 0)),
        (D, Heartbeat(0, 1, 0)),
    }
    router.now += 0.9
    router.bus.tick()
    assert router.take(Tag.HEARTBEAT) == []
    for _ in range(4):
        router.now += 1.0
        router.beat(P, load())
        router.bus.tick()
    assert router.fleet.get(P) is not None and router.fleet.get(D) is None
    assert sink.error.code is ErrorCode.WORKER_LOST
    assert [worker.state for worker in router.fleet] == [WorkerState.READY, WorkerState.LOST]


def test_a_worker_whose_heartbeats_wait_behind_tokens_is_not_silent() -> None:
    router = Router()
    router.pair()
    beaten_at, worker = router.now, router.fleet.get(D)
    assert worker is not None
    for _ in range(2 * MISSED_BEATS):
        router.now += 1.0
        router.beat(P, load())
        router.say(D, DecodeToken(9, 7))  # whatever it is about
        router.bus.tick()
        assert router.fleet.get(D) is worker and worker.is_ready
        assert worker.last_seen == beaten_at, "its figures are as old as its last heartbeat"
    router.beat(D, load())
    assert worker.last_seen == router.now


@pytest.mark.parametrize("peer", [P, D])
def test_heartbeats_feed_the_prefix_index(peer: bytes) -> None:
    router = Router()
    router.pair()
    hashes = prefix_hashes(range(32), 16)
    router.beat(peer, load(64, cached=2, stored=tuple(hashes)))
    assert router.bus.index.matches(hashes) == {peer: 2}
    router.beat(peer, load(64, evicted=tuple(hashes[1:])))
    assert router.bus.index.matches(hashes) == {peer: 1}
    router.beat(peer, load(64, disk=TierLoad(evicted=tuple(hashes[:1]))))
    assert router.bus.index.matches(hashes) == {}
    router.beat(peer, load(64, stored=tuple(hashes)))
    router.bus.on_lost(peer)
    assert router.bus.index.matches(hashes) == {}


def test_prefixes_of_tiers_have_room_in_the_index() -> None:
    router = Router()
    router.join(Role.DECODE, 0, num_blocks=2, num_tier_blocks=2)
    hashes = prefix_hashes(range(5 * 16), 16)
    router.beat(D, load(2, stored=tuple(hashes)))
    assert router.bus.index.size(D) == 4


def test_costs_of_heartbeats_hold_from_the_next_tick() -> None:
    router = Router()
    router.pair()
    router.beat(P, load(64, token_s=2e-4))
    router.now += 1.0
    router.bus.tick()
    costs = {worker.role: (worker.token_s, worker.step_s) for worker in router.fleet}
    assert costs == {Role.PREFILL: (2e-4, 0.0), Role.DECODE: (2e-4, 0.0)}


def test_a_worker_whose_queue_is_full_is_dropped_from_the_next_tick() -> None:
    router = Router()
    router.pair()
    router.full.add(P)
    _, sink = router.submit()
    assert router.fleet.get(P) is not None
    router.bus.tick()
    assert router.fleet.get(P) is None and sink.error.code is ErrorCode.WORKER_LOST
    assert router.forgotten == [P], "what waits for it is dropped"
