"""Samples of a cluster, and the rows and the summary of `baton top`, computed from two of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from router.command.client import Client
from router.command.terminal import printable

WIDTH: Final = 12
TOKENS: Final = b"baton_inter_token_seconds_count "
# The columns by which rows can be sorted, in the order of the key `s`.
COLUMNS: Final = (
    *("worker", "state", "running", "waiting", "steps/s", "blocks", "cached"),
    *("KV moving", "KV rate", "seen", "computes"),
)


class Sample(NamedTuple):
    """The state of a cluster at one time.

    Attributes:
        at: The time in seconds.
        cluster: The response of GET /v1/cluster.
        tokens: How many tokens the router has streamed over HTTP.
    """

    at: float
    cluster: Mapping[str, Any]
    tokens: float


class Cell(NamedTuple):
    """A value by which rows are sorted, and its text."""

    key: Any
    text: str


# The cells of a worker by the names of `COLUMNS`.
Row = Mapping[str, Cell]


def sample(router: Client) -> Sample:
    """Return the state of the cluster now.  Raises RequestError."""
    cluster, at = router.call("/v1/cluster"), time.monotonic()
    lines = router.read("/metrics").splitlines()
    tokens = next((float(line[len(TOKENS) :]) for line in lines if line.startswith(TOKENS)), 0)
    return Sample(at, cluster, tokens)


def rows_of(now: Sample, before: Sample | None) -> list[Row]:
    """Return a row for each worker; rates are those since the sample `before`."""
    steps = {} if before is None else {_seat(row): row["step"] for row in before.cluster["workers"]}
    seconds = 0.0 if before is None else now.at - before.at
    return [_row(row, steps.get(_seat(row)), seconds) for row in now.cluster["workers"]]


def shown(rows: Sequence[Row], *, by: str, is_reversed: bool, text: str) -> list[Row]:
    """Return the rows that contain `text`, sorted by a column."""
    wanted = text.casefold()
    found = [row for row in rows if wanted in " ".join(it.text for it in row.values()).casefold()]
    return sorted(found, key=lambda row: row[by].key, reverse=is_reversed)


def summary(now: Sample, before: Sample | None) -> str:
    """Return the first line: requests, tokens a second, workers by state, refused workers."""
    counts, workers = now.cluster["router"], now.cluster["workers"]
    states: dict[str, int] = {}
    for row in workers:
        states[row["state"]] = states.get(row["state"], 0) + 1
    parts = [f"{counts['running']} running, {counts['waiting']} waiting"]
    if before is not None and now.at > before.at:
        rate = max(0.0, now.tokens - before.tokens) / (now.at - before.at)
        parts.append(f"{rate:.0f} tokens/s streamed")
    parts.append(", ".join(f"{num} {state}" for state, num in states.items()) or "no workers")
    if refused := now.cluster.get("refused"):
        parts.append(f"refused: {', '.join(str(row['worker']) for row in refused)}")
    return " · ".join(parts)


def _seat(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row["role"], row["rank"], row["epoch"]


def _row(row: Mapping[str, Any], step_before: int | None, seconds: float) -> Row:
    blocks, moving, byte_s = row["blocks"], row["kv_inflight_bytes"], row["costs"]["kv_byte_s"]
    steps_s = 0.0
    if step_before is not None and seconds > 0:
        steps_s = max(0, row["step"] - step_before) / seconds
    gb_s = 1 / byte_s / 1e9 if byte_s else 0.0
    computes = printable(str(row["computes"]["arithmetic"]))
    share = blocks["used"] / max(1, blocks["total"])
    cells = (
        Cell((row["role"], row["rank"]), f"{row['role']}-{row['rank']}"),
        Cell(row["state"], row["state"]),
        Cell(row["running"], f"{row['running']}"),
        Cell(row["waiting"], f"{row['waiting']}"),
        Cell(steps_s, f"{steps_s:.1f}"),
        Cell(share, bar(blocks["used"], blocks["total"])),
        Cell(blocks["cached"], f"{blocks['cached']}"),
        Cell(moving, f"{moving / 2**20:.0f} MiB"),
        Cell(gb_s, f"{gb_s:.2f} GB/s" if gb_s else ""),
        Cell(row["last_seen_s"], f"{row['last_seen_s']:.1f} s"),
        Cell(computes, computes),
    )
    return dict(zip(COLUMNS, cells, strict=True))


def bar(used: int, total: int) -> str:
    """Draw the share of blocks in use, with the numbers."""
    full = round(WIDTH * used / total) if total else 0
    return f"{'█' * full}{'░' * (WIDTH - full)} {used}/{total}"
