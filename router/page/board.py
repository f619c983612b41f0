"""The state that the page shows: a snapshot for a new viewer, and changes for the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import structs

from router.core.cluster import reasons_of, together
from router.page.activity import Activity, Row, Sums, Work

# The most requests that have ended in a snapshot.
MAX_ROWS: Final = 240
# A point has the counts of one look.  Only of the latest does the page read the links and the work
# of each worker, which are most of a point.
MAX_POINTS: Final = 300
MAX_WHOLE_POINTS: Final = 30
# The fields of a worker in GET /v1/cluster that the page shows.
_FIELDS: Final = (
    *("role", "rank", "state", "why", "placed", "running", "waiting", "blocks"),
    *("kv_inflight_bytes", "computes"),
)
K = TypeVar("K")


class Board:
    """Merges the activities of the router's processes, and says what has changed.

    Args:
        about: Fields of each snapshot that never change.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._about = about
        self._now = 0.0
        self._router: dict[str, Any] = {}
        self._workers: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, Row] = {}
        self._points: deque[dict[str, Any]] = deque(maxlen=MAX_POINTS)
        # The sums of each process at the last look.
        self._sums: dict[int, Sums] = {}

    def snapshot(self) -> bytes:
        """Return the whole state, as an event."""
        known = {
            **self._about,
            "now": self._now,
            "router": self._router,
            "workers": self._workers,
            "requests": list(self._rows.values()),
            "points": list(self._points),
        }
        return _event(b"snapshot", known)

    def update(self, activities: Sequence[Activity]) -> bytes:
        """Take in a look at every process; return what has changed, as an event."""
        self._now = round(max(each.now for each in activities), 3)
        states = [each.state for each in activities]
        cluster = together(states, are_several=len(states) > 1)
        router = cluster["router"] | {"reasons": reasons_of(states)}
        workers = {
            f"{row['role']}-{row['rank']}": {name: row[name] for name in _FIELDS}
            for row in cluster["workers"]
        }
        point = {"now": self._now} | self._counted(activities)
        changed = {
            name: new
            for name, row in workers.items()
            if (new := _changes(self._workers.get(name, {}), row))
        }
        changes = {
            "now": self._now,
            "router": _changes(self._router, router),
            "workers": changed | dict.fromkeys(self._workers.keys() - workers.keys()),
            "requests": self._update_rows(activities),
            "point": point,
        }
        self._router, self._workers = router, workers
        self._points.append(point)
        if len(self._points) > MAX_WHOLE_POINTS:
            _reduce(self._points[-MAX_WHOLE_POINTS - 1])
        return _event(b"delta", changes)

    def _update_rows(self, activities: Iterable[Activity]) -> list[dict[str, Any]]:
        """Take in the rows of all processes; return the changes, with `is_gone` for lost rows."""
        changed, opened = [], set()
        for row in (row for each in activities for row in each.rows):
            if row.total_s is None:
                opened.add(row.key)
            if row != (old := self._rows.get(row.key)):
                self._rows[row.key] = row
                changed.append(_row_changes(old, row))
        # These were open and are not listed any more: their process has ended, or keeps no records.
        lost = [k for k, row in self._rows.items() if row.total_s is None and k not in opened]
        ended = [key for key, row in self._rows.items() if row.total_s is not None]
        for key in lost + ended[: max(0, len(self._rows) - len(lost) - MAX_ROWS)]:
            del self._rows[key]
        return changed + [{"key": key, "is_gone": True} for key in lost]

    def _counted(self, activities: Iterable[Activity]) -> dict[str, Any]:
        """Return what was counted since the last look, in all processes."""
        new = Sums({}, {}, {}, {}, {})
        for each in activities:
            # What a process counted before the first look does not belong to this point.
            last = self._sums.get(each.state.pid, each.sums)
            _add_new(new.ended, each.sums.ended, last.ended)
            _add_new(new.ttft, each.sums.ttft, last.ttft)
            _add_new(new.itl, each.sums.itl, last.itl)
            for name, work in each.sums.work.items():
                old, total = last.work.get(name, Work()), new.work.setdefault(name, Work())
                counts = zip(structs.astuple(work), structs.astuple(old), strict=True)
                total.add(*[max(0, count - before) for count, before in counts])
            for link, (kv_bytes, seconds) in each.sums.links.items():
                old_bytes, old_s = last.links.get(link, (0, 0.0))
                if kv_bytes > old_bytes:
                    before = new.links.get(link, (0, 0.0))
                    new.links[link] = before[0] + kv_bytes - old_bytes, before[1] + seconds - old_s
        self._sums = {each.state.pid: each.sums for each in activities}
        new.work = {name: work for name, work in new.work.items() if work != Work()}
        return {name: counts for name, counts in structs.asdict(new).items() if counts}


def _reduce(point: dict[str, Any]) -> None:
    """Drop the links of a point, and add up the work of its workers."""
    point.pop("links", None)
    total = Work()
    for work in point.pop("work", {}).values():
        total.add(*structs.astuple(work))
    if total != Work():
        point["work"] = {"": total}


def _add_new(total: dict[K, int], sums: Mapping[K, int], last: Mapping[K, int]) -> None:
    for key, count in sums.items():
        if (num_new := count - last.get(key, 0)) > 0:
            total[key] = total.get(key, 0) + num_new


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have changed, with None for those that are gone."""
    changed = {name: value for name, value in new.items() if old.get(name) != value}
    return changed | dict.fromkeys(old.keys() - new.keys())


def _row_changes(old: Row | None, row: Row) -> dict[str, Any]:
    """Return the fields of a row that have changed, and its key."""
    if old is not None and structs.replace(old, tokens=row.tokens) == row:
        return {"key": row.key, "tokens": row.tokens}  # most rows of most looks
    before = {} if old is None else msgspec.to_builtins(old)
    return {"key": row.key} | _changes(before, msgspec.to_builtins(row))


def _event(name: bytes, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(data))
