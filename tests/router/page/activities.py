"""Looks at router processes, as tests make them up."""

from __future__ import annotations

from typing import Any

from router.core.cluster import ProcessState
from router.page.activity import Activity, Row, Sums


def worker(rank: int = 0, **changes: Any) -> dict[str, Any]:
    shown = {"role": "decode", "rank": rank, "state": "ready", "why": "", "placed": 0}
    shown |= {"running": 0, "waiting": 0, "blocks": {"used": 0}, "kv_inflight_bytes": 0}
    return shown | {"computes": {}, "last_seen_s": 0.1, "epoch": 1} | changes


def activity(
    now: float,
    *rows: Row,
    pid: int = 1,
    workers: tuple[dict[str, Any], ...] = (),
    **sums: Any,
) -> Activity:
    counted = Sums(**{"ended": {}, "ttft": {}, "itl": {}, "work": {}, "links": {}} | sums)
    return Activity(now, ProcessState(pid, 1, 0, [], list(workers)), list(rows), counted)


def row(key: str, state: str = "decode", **changes: Any) -> Row:
    fields: dict[str, Any] = {"id": f"id-{key}", "at": 1.0, "prompt": 3}
    return Row(key=key, state=state, **fields | changes)
