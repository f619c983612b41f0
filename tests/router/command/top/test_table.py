"""Rows and rates from two samples."""

from __future__ import annotations

from typing import Any

from router.command.top.table import Sample, bar, rows_of, shown, summary


def worker(role: str, rank: int, **changes: Any) -> dict[str, Any]:
    return {
        "role": role,
        "rank": rank,
        "epoch": 1,
        "state": "ready",
        "last_seen_s": 0.25,
        "running": rank,
        "waiting": 0,
        "step": 0,
        "blocks": {"total": 8, "used": 4, "cached": 1, "free": 3},
        "kv_inflight_bytes": 3 << 20,
        "costs": {"kv_byte_s": 5e-10},
        "computes": {"arithmetic": "hash"},
    } | changes


def sample(at: float, *workers: dict[str, Any], tokens: float = 0, **more: Any) -> Sample:
    counts = {"running": 3, "waiting": 1}
    return Sample(at, {"workers": list(workers), "router": counts, **more}, tokens)


def cell(row: Any, name: str) -> str:
    return str(row[name].text)


def test_a_row_has_rates_since_the_sample_before() -> None:
    before, now = sample(1.0, worker("any", 0, step=10)), sample(3.0, worker("any", 0, step=25))
    (row,) = rows_of(now, before)
    assert cell(row, "steps/s") == "7.5" and cell(row, "KV rate") == "2.00 GB/s"
    assert cell(row, "KV moving") == "3 MiB" and cell(row, "blocks") == bar(4, 8)
    (first,) = rows_of(now, None)
    assert cell(first, "steps/s") == "0.0"
    # A worker that has started again counts from 0.
    (again,) = rows_of(sample(3.0, worker("any", 0, step=5, epoch=2)), before)
    assert cell(again, "steps/s") == "0.0"


def test_rows_are_sorted_by_value_and_filtered_by_any_text() -> None:
    now = sample(0.0, *(worker("decode", rank) for rank in (2, 10)), worker("prefill", 1))

    def names(by: str, text: str = "", *, is_reversed: bool = False) -> list[str]:
        found = shown(rows_of(now, None), by=by, is_reversed=is_reversed, text=text)
        return [row["worker"].text for row in found]

    assert names("worker") == ["decode-2", "decode-10", "prefill-1"]
    assert names("running", is_reversed=True) == ["decode-10", "decode-2", "prefill-1"]
    assert names("worker", "PREF") == ["prefill-1"] and names("worker", "ready") != []
    assert names("worker", "nothing") == []


def test_the_summary() -> None:
    before, lost = sample(1.0, tokens=100), worker("decode", 1, state="lost")
    refused = [{"worker": "decode-9"}]
    now = sample(3.0, worker("any", 0), lost, tokens=400, refused=refused)
    assert summary(now, before) == (
        "3 running, 1 waiting · 150 tokens/s streamed · 1 ready, 1 lost · refused: decode-9"
    )
    assert summary(sample(0.0), None) == "3 running, 1 waiting · no workers"
    # A router that has started again counts from 0.
    assert " 0 tokens/s" in summary(sample(3.0, tokens=5), before)


def test_a_bar_and_a_name_with_control_characters() -> None:
    assert bar(0, 0) == "░" * 12 + " 0/0" and bar(8, 8) == "█" * 12 + " 8/8"
    (row,) = rows_of(sample(0.0, worker("any", 0, computes={"arithmetic": "\x1b[2Jx"})), None)
    assert cell(row, "computes") == "[2Jx"
