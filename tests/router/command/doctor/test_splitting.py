"""The rate of loopback, and the prediction whether splitting pays."""

from __future__ import annotations

from typing import Any

from router.command.doctor.splitting import PROMPT, check_links, loopback_rate, predict


def row(role: str, cores: str, **costs: float) -> dict[str, Any]:
    names = ("token_s", "kv_transfer_s", "kv_byte_s")
    return {
        "role": role,
        "rank": 0,
        "costs": dict.fromkeys(names, 0.0) | costs,
        "computes": {"arithmetic": "cpu", "cores": cores},
        "kv": {"endpoint": "tcp://127.0.0.1:1", "token_bytes": 1000},
    }


def test_loopback_is_measured_and_links_are_those_that_the_router_has_learnt() -> None:
    assert loopback_rate() > 1e6
    found = check_links(
        2e9, [row("prefill", "0", kv_byte_s=1e-9), row("decode", "0", kv_byte_s=1e-9)]
    )
    assert [each.where for each in found] == ["loopback TCP", "KV to decode-0"]
    assert found[0].what.startswith("2.0 GB/s") and found[1].what.startswith("1.00 GB/s")


def test_splitting_pays_once_the_delayed_answers_outweigh_the_transfer() -> None:
    # A prompt takes 1024 x 1 ms = 1.024 s of prefill, and 2 s + 1024 x 1000 x 1 us = 3.024 s of KV.
    costs = {"token_s": 1e-3, "kv_transfer_s": 2.0, "kv_byte_s": 1e-6}
    found = predict([row("decode", "0", **costs), row("prefill", "1")], 1e9)
    assert found.level == "ok" and "pays from 3 answers at a time" in found.what
    # Without a measured transfer, the rate of loopback counts: 1024 x 1000 / 1e9 = 1 ms.
    found = predict([row("any", "0", token_s=1e-3)], 1e9)
    assert "pays from the first answer on" in found.what and f"{PROMPT} tokens" in found.where


def test_roles_that_share_cores_gain_nothing_and_without_measurements_nothing_is_said() -> None:
    found = predict([row("decode", "0-1", token_s=1e-3), row("prefill", "1")], 1e9)
    assert found.level == "warning" and "share cores" in found.what
    for live in ([], [row("decode", "0")]):
        assert "a running cluster" in predict(live, 1e9).what
