"""Refused workers are listed until they join, and their number is bounded."""

from __future__ import annotations

from router.core.refusals import MAX_REFUSED, Refusals


def test_the_latest_refusals_are_listed_until_a_worker_joins() -> None:
    refusals = Refusals()
    for rank in range(MAX_REFUSED + 1):
        refusals.add(f"decode-{rank}", "another model", 1.0)
    refusals.add("decode-1", "another layout", 2.0)
    refusals.forget("decode-2")
    refusals.forget("decode-99")
    rows = refusals.rows(3.5)
    names = [f"decode-{rank}" for rank in range(3, MAX_REFUSED + 1)]
    assert [row["worker"] for row in rows] == [*names, "decode-1"]
    assert rows[-1] == {"worker": "decode-1", "reason": "another layout", "last_seen_s": 1.5}
