"""A snapshot, and changes that make of an older snapshot the next one."""

from __future__ import annotations

import json
from typing import Any

from router.page.activity import Work
from router.page.board import MAX_ROWS, MAX_WHOLE_POINTS, Board
from tests.router.page.activities import activity, row, worker


def parsed(event: bytes) -> tuple[str, dict[str, Any]]:
    name, data = event.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def applied(known: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    """Apply a delta as stream.js does."""

    def change(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in (old | new).items() if v is not None}

    workers = {
        name: change(known["workers"].get(name, {}), new)
        for name, new in (known["workers"] | delta["workers"]).items()
        if new is not None
    }
    rows = {each["key"]: each for each in known["requests"]}
    for each in delta["requests"]:
        if each.pop("is_gone", False):
            del rows[each["key"]]
        else:
            rows[each["key"]] = change(rows.get(each["key"], {}), each)
    return {
        "model": known["model"],
        "now": delta["now"],
        "router": change(known["router"], delta["router"]),
        "workers": workers,
        "requests": list(rows.values()),
        "points": [*known["points"], delta["point"]],
    }


def test_changes_make_the_next_snapshot_of_the_last_one() -> None:
    board = Board({"model": "demo"})
    board.update([activity(1.0, row("1"), workers=(worker(), worker(1)))])
    looks = (
        activity(2.0, row("1", tokens=4), row("2", "prefill"), workers=(worker(), worker(1))),
        activity(3.0, row("1", "stop", total_s=2.0), workers=(worker(why="silent"),)),
        activity(4.0, workers=(worker(state="lost", blocks={"used": 9}),)),
    )
    for look in looks:
        _, before = parsed(board.snapshot())
        name, delta = parsed(board.update([look]))
        _, after = parsed(board.snapshot())
        assert name == "delta" and applied(before, delta) == after
    [left] = after["requests"]
    assert (left["key"], left["state"], left["total_s"]) == ("1", "stop", 2.0)
    assert list(after["workers"]) == ["decode-0"] and "last_seen_s" not in after["workers"]


def test_what_has_not_changed_is_not_sent() -> None:
    board, look = Board({}), activity(1.0, row("1"), workers=(worker(),))
    board.update([look])
    _, delta = parsed(board.update([look]))
    assert delta == {
        "now": 1.0,
        "router": {},
        "workers": {},
        "requests": [],
        "point": {"now": 1.0},
    }


def test_counts_are_of_the_time_since_the_last_look_in_all_processes() -> None:
    board = Board({})
    old: dict[str, Any] = {"ended": {"stop": 5}, "links": {"prefill-0>decode-0": (10, 1.0)}}
    board.update([activity(1.0, **old)])
    new: dict[str, Any] = {
        "ended": {"stop": 7},
        "links": {"prefill-0>decode-0": (30, 1.5)},
        "work": {"decode-0": Work(0, 0, 4)},
    }
    other: dict[str, Any] = {"ended": {"stop": 100}}
    _, delta = parsed(board.update([activity(2.0, **new), activity(2.0, pid=2, **other)]))
    assert delta["point"] == {
        "now": 2.0,
        "ended": {"stop": 2},
        "work": {"decode-0": {"prompt": 0, "cached": 0, "generated": 4}},
        "links": {"prefill-0>decode-0": [20, 0.5]},
    }
    other["ended"] = {"stop": 101}
    # The first process was started again.
    _, delta = parsed(board.update([activity(3.0), activity(3.0, pid=2, **other)]))
    assert delta["point"] == {"now": 3.0, "ended": {"stop": 1}}


def test_rows_are_bounded_and_those_of_a_lost_process_go() -> None:
    board = Board({})
    board.update([activity(1.0), activity(1.0, row("2-1"), pid=2)])
    ended = [row(f"1-{number}", "stop", total_s=1.0) for number in range(2 * MAX_ROWS)]
    _, delta = parsed(board.update([activity(2.0, *ended)]))
    assert {"key": "2-1", "is_gone": True} in delta["requests"]
    _, known = parsed(board.snapshot())
    keys = [each["key"] for each in known["requests"]]
    assert keys == [f"1-{number}" for number in range(MAX_ROWS, 2 * MAX_ROWS)]


def test_old_points_have_no_links_and_one_sum_of_the_work_of_all_workers() -> None:
    board, num = Board({}), MAX_WHOLE_POINTS + 1
    for turn in range(num + 1):
        work = {"prefill-0": Work(turn, 0, 0), "decode-0": Work(0, 0, 2 * turn)}
        links = {"prefill-0>decode-0": (turn, float(turn))}
        board.update([activity(float(turn), work=work, links=links)])
    _, known = parsed(board.snapshot())
    _, reduced, whole = known["points"][:3]
    assert reduced == {"now": 1.0, "work": {"": {"prompt": 1, "cached": 0, "generated": 2}}}
    assert set(whole["work"]) == {"prefill-0", "decode-0"} and "links" in whole
