"""Clusters that are hard to bring about: rows of /v1/cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.command.doctor.cluster import (
    Reply,
    check_alike,
    check_cluster,
    check_loopback,
    check_refused,
    check_worker,
    fetch,
)
from router.command.doctor.finding import Finding
from tests.router.command.serving import serving

START_NS = 1_700_000_000 * 10**9


def row(**changes: Any) -> dict[str, Any]:
    """A worker that is well."""
    return {
        "role": "decode",
        "rank": 0,
        "epoch": START_NS,
        "state": "ready",
        "last_seen_s": 0.5,
        "waiting": 0,
        "blocks": {"total": 8, "used": 0, "cached": 0, "free": 8},
        "computes": {"arithmetic": "hash", "threads": 1, "cores": "0"},
        "kv": {"endpoint": "tcp://127.0.0.1:1", "layout": "2 layers", "token_bytes": 64},
    } | changes


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({}, "ok", "computes with hash, 1 threads, 8 of 8 blocks free"),
        ({"state": "lost", "why": "its connection closed"}, "fault", "its connection closed"),
        ({"state": "suspect"}, "fault", "stands still"),
        ({"epoch": START_NS + 9 * 10**9}, "warning", "9 s ahead"),
        (
            {"waiting": 3, "blocks": {"total": 8, "used": 8, "cached": 0, "free": 0}},
            "warning",
            "all 8 KV blocks are used and 3 requests wait",
        ),
    ],
)
def test_the_state_of_a_worker(changes: dict[str, Any], level: str, says: str) -> None:
    (found,) = check_worker(row(**changes), START_NS)
    assert found.level == level and says in found.what


def test_workers_that_compute_differently() -> None:
    cuda = {"arithmetic": "cuda", "threads": 1, "cores": ""}
    other = row(kv={"endpoint": "", "layout": "3 layers"}, computes=cuda)
    assert [each.level for each in check_alike([row(), other])] == ["fault", "warning"]
    assert [each.level for each in check_alike([row(), row()])] == ["ok"]


def test_a_loopback_address_in_a_cluster_of_several_machines() -> None:
    assert check_loopback("http://127.0.0.1:8000", [row()]) == []
    assert [each.level for each in check_loopback("http://10.0.0.5:8000", [row()])] == ["warning"]


def test_every_kind_of_refusal_has_its_cure() -> None:
    reasons = {
        "KV layout 2, the cluster has 3": "--kv-dtype",
        "protocol version 2, the router speaks 3": "pip install",
        "decode-0 is here already and alive": "another --rank",
        "no KV blocks; set --num-blocks": "restart decode-1",
    }
    refused = [{"worker": "decode-1", "reason": it, "last_seen_s": 1.0} for it in reasons]
    found = check_refused(refused)
    assert all(cure in each.cure for each, cure in zip(found, reasons.values(), strict=True))


def test_a_router_whose_clock_is_wrong_and_that_is_not_ready() -> None:
    reasons = ["no decode worker is ready: decode-0 is lost"]
    body = json.dumps({"workers": [row(kv={})], "router": {}, "reasons": reasons}).encode()
    with serving(lambda _: (200, body), date="Tue, 14 Nov 2023 22:13:20 GMT") as url:
        reply = fetch(url)
    assert isinstance(reply, Reply)
    bad = [each for each in check_cluster(url, reply) if each.level != "ok"]
    clock, ready = (each for each in bad if each.where == url)
    assert (clock.level, ready.level, ready.what) == ("warning", "fault", reasons[0])
    assert "behind this one" in clock.what
    with serving(lambda _: (200, body)) as url:
        reply = fetch(url)
    assert isinstance(reply, Reply) and reply.skew_s == 0


@pytest.mark.parametrize(
    ("status", "body", "cure"),
    [
        (401, b"{}", "BATON_API_KEY"),
        (404, b"{}", "--http"),
        (200, b"[]", "--http"),
        (200, b"{}", "--http"),
        (200, b"<html>", "--http"),
    ],
)
def test_what_is_no_router_or_refuses_us(status: int, body: bytes, cure: str) -> None:
    with serving(lambda _: (status, body)) as url:
        found = fetch(url)
    assert isinstance(found, Finding) and found.level == "fault" and cure in found.cure


def test_nobody_listens() -> None:
    assert fetch("http://127.0.0.1:1") is None
