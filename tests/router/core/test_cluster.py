"""The fleet as JSON, and whether it can serve."""

from __future__ import annotations

import json
import shlex

import structlog.testing

from router.core.cluster import (
    AGAIN_S,
    Readiness,
    is_free,
    state_of,
    status_line,
    together,
    try_this,
    unready,
)
from router.core.state import Limits
from tests.router.scripted import Router, load
from wire.frames import Role
from wire.payloads import TierLoad


def test_every_worker_and_the_routers_own_requests() -> None:
    router = Router()
    _, decode = router.pair(cores="0-3")
    router.join(Role.PREFILL, rank=1)
    host = TierLoad(max_blocks=9, blocks=4, bytes=4096, loaded_tokens=32)
    router.beat(decode, load(64, used=3, cached=10, kv_inflight_bytes=5, host=host))
    router.submit()
    body = together([state_of(router.dispatcher, now=router.now + 2)])
    names = [(worker["role"], worker["rank"]) for worker in body["workers"]]
    assert names == [("prefill", 0), ("prefill", 1), ("decode", 0)]
    assert body["workers"][2] == {
        "role": "decode",
        "rank": 0,
        "epoch": 1,
        "state": "ready",
        "why": "",
        "last_seen_s": 2.0,
        "placed": 1,
        "running": 0,
        "waiting": 0,
        "step": 1,
        "blocks": {"total": 64, "used": 3, "cached": 10, "free": 51},
        "tiers": {"host": {"max_blocks": 9, "blocks": 4, "bytes": 4096, "loaded_tokens": 32}},
        "kv_inflight_bytes": 5,
        "costs": {
            "step_s": 0.0,
            "token_s": 0.0,
            "sequence_s": 0.0,
            "kv_transfer_s": 0.0,
            "kv_byte_s": 0.0,
        },
        "computes": {"arithmetic": "hash", "threads": 1, "cores": "0-3", "shards": 1, "stages": 1},
        "kv": {
            "endpoint": "tcp://127.0.0.1:1",
            "layout": "2 layers x 2 heads x 8 of uint8",
            "token_bytes": 64,
            "block_size": 16,
        },
    }
    assert body["router"] == {"running": 1, "waiting": 0, "fingerprint": "f00d"}
    assert body["refused"] == []


def test_a_refused_worker_is_listed_until_it_joins() -> None:
    router = Router()
    router.pair()
    router.join(Role.DECODE, rank=1, fingerprint="other")
    router.now += 2
    states = [state_of(router.dispatcher, now=router.now)] * 2
    (row,) = together(states, are_several=True)["refused"]
    assert (row["worker"], row["last_seen_s"]) == ("decode-1", 2.0)
    assert "model fingerprint other, the router has f00d" in row["reason"]
    router.join(Role.DECODE, rank=1)
    assert state_of(router.dispatcher, now=router.now).refused == []


def test_why_a_worker_is_lost_or_suspect() -> None:
    router = Router(stall_s=2.0)
    prefill, decode = router.pair()

    def why() -> list[str]:
        state = state_of(router.dispatcher, router.now)
        return [row["why"] for row in state.workers]

    router.beat(decode, load(64, step_ms=2500))
    assert why() == ["", "its engine is stalled in one step"]
    router.now += 2.5
    router.beat(decode, load(64))
    router.bus.tick()
    assert why() == ["it is silent", ""]
    router.bus.on_lost(prefill)
    router.bus.on_lost(decode)
    assert why() == ["its connection closed"] * 2
    router.pair()
    assert why() == [""] * 2


def test_why_it_is_not_ready() -> None:
    router, local = Router(), Router(Limits(local_prefill=True))

    def reasons(router: Router, *, is_draining: bool = False) -> list[str]:
        missing = router.dispatcher.missing_roles
        return unready(missing, router.fleet, is_draining=is_draining)

    assert len(reasons(router)) == 2 and len(reasons(local)) == 1
    router.join(Role.PREFILL)
    assert reasons(router) == ["no worker that can decode is ready"]
    leaving = router.join(Role.ANY, rank=1)
    router.fleet.drain(leaving)
    assert reasons(router) == ["no worker that can decode is ready: any-1 is draining"]
    router.join(Role.DECODE)
    assert reasons(router) == []
    assert reasons(router, is_draining=True) == ["the router is draining"]
    local.join(Role.DECODE)
    assert reasons(local) == []


def said(reasons: list[list[str]], times: list[float]) -> list[str]:
    """The events of a `Readiness` that looks at these times."""
    readiness = Readiness("curl x")
    with structlog.testing.capture_logs() as lines:
        for why, now in zip(reasons, times, strict=True):
            readiness.on_look(why, now)
    return [f"{line['log_level']}: {line['event']}" for line in lines]


def test_it_says_that_it_waits_now_and_then_and_that_it_is_ready_once() -> None:
    waits, ready = "info: waiting for workers", "info: ready; try curl x"
    misses = "warning: waiting for workers"
    assert said([["no"]] * 3, [5.0, 6.0, 4.9 + AGAIN_S]) == [waits]
    assert said([["no"]] * 3, [5.0, 5.0 + AGAIN_S, 5.1 + AGAIN_S]) == [waits, waits]
    assert said([["no"], [], []], [5.0, 6.0, 60.0]) == [waits, ready]
    assert said([[], ["no"], ["no"], []], [5.0, 6.0, 7.0, 8.0]) == [ready, misses, ready]


def test_try_this_is_a_shell_command_for_this_router() -> None:
    for has_text, prompt in [(True, "Once upon a time"), (False, [1, 2, 3])]:
        command = try_this("http://[::1]:8000", "it's", has_text=has_text, has_keys=False)
        curl, url, _, kind, _, body = shlex.split(command)
        assert (curl, url) == ("curl", "http://[::1]:8000/v1/completions")
        assert kind == "content-type: application/json"
        assert json.loads(body) == {"model": "it's", "prompt": prompt, "max_tokens": 16}
    assert "$BATON_API_KEY" in try_this("https://h:1", "m", has_text=True, has_keys=True)


def test_several_processes_are_one_router() -> None:
    states = []
    for pid in (1, 2):
        router = Router()
        router.pair()
        if pid == 2:
            router.join(Role.DECODE, rank=1)
        router.submit()
        states.append(state_of(router.dispatcher, now=router.now))
        states[-1].pid = pid
    body = together(states, are_several=True)
    assert body["router"] == {
        "running": 2,
        "waiting": 0,
        "fingerprint": "f00d",
        "processes": [{"pid": pid, "running": 1, "waiting": 0} for pid in (1, 2)],
    }
    rows = [(row["role"], row["rank"], row["placed"]) for row in body["workers"]]
    assert rows == [("prefill", 0, 2), ("decode", 0, 2), ("decode", 1, 0)]
    alone = together(states[:1], are_several=True)["router"]  # the other has just died
    assert [each["pid"] for each in alone["processes"]] == [1]
    assert status_line(states) == "2 running, 0 waiting, 1 prefill and 2 decode workers ready"
    router.join(Role.ANY, rank=2)
    line = status_line([state_of(router.dispatcher, now=router.now)])
    assert line.endswith("1 prefill and 2 decode and 1 any workers ready")
    assert together(states, are_several=True) == body, "what is asked twice is counted once"


def test_a_rank_is_free_when_no_process_knows_it() -> None:
    assert not is_free([], "decode", 0)
    empty, router = state_of(Router().dispatcher, now=0.0), Router()
    assert is_free([empty], "decode", 0)
    worker = router.join(Role.DECODE)
    states = [empty, state_of(router.dispatcher, now=0.0)]
    assert not is_free(states, "decode", 0)
    assert is_free(states, "decode", 1) and is_free(states, "prefill", 0)
    assert not is_free(states, "any", 0), "decode and any share ranks"
    router.fleet.lose(worker)
    assert is_free([empty, state_of(router.dispatcher, now=0.0)], "decode", 0)
