"""The fleet as JSON, and whether it can serve."""

from __future__ import annotations

from router.cluster import cluster, unready
from tests.router.scripted import Router, load
from wire.frames import Role


def test_every_worker_and_the_routers_own_requests() -> None:
    router = Router()
    _, decode = router.pair()
    router.join(Role.PREFILL, rank=1)
    router.beat(decode, load(64, used=3, cached=10, kv_inflight_bytes=5))
    router.submit()
    body = cluster(router.fleet, router.inflight, now=router.now + 2)
    names = [(worker["role"], worker["rank"]) for worker in body["workers"]]
    assert names == [("prefill", 0), ("prefill", 1), ("decode", 0)]
    assert body["workers"][2] == {
        "role": "decode",
        "rank": 0,
        "epoch": 1,
        "state": "ready",
        "last_seen_s": 2.0,
        "placed": 1,
        "running": 0,
        "waiting": 0,
        "step": 1,
        "blocks": {"total": 64, "used": 3, "cached": 10, "free": 51},
        "kv_inflight_bytes": 5,
    }
    assert body["router"] == {"running": 1, "waiting": 0}


def test_a_lost_worker_holds_nothing() -> None:
    router = Router()
    prefill, _ = router.pair()
    router.bus.on_lost(prefill)
    worker = cluster(router.fleet, router.inflight, now=router.now + 2)["workers"][0]
    assert worker["state"] == "lost"
    assert worker["blocks"] == {"total": 0, "used": 0, "cached": 0, "free": 0}


def test_why_it_is_not_ready() -> None:
    router = Router()
    assert len(unready(router.fleet, is_draining=False)) == 2
    router.join(Role.PREFILL)
    assert unready(router.fleet, is_draining=False) == ["no decode worker is ready"]
    router.join(Role.DECODE)
    assert unready(router.fleet, is_draining=False) == []
    assert unready(router.fleet, is_draining=True) == ["the router is draining"]
