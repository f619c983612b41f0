"""Workers killed with SIGKILL in each state that a request can be in, under load.

A state is waited for, not hoped for: `/v1/cluster` says who reads and who generates, the relays say
whose KV bytes are under way, the clients say who has a first token only.  The load is shaped so
that each state lasts: chunked prompts, steps of some milliseconds, KV links with a bounded rate,
and raw TCP clients that pause before DECODE_REQUEST.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from scripts.faults.clients import Record
from scripts.faults.cluster import FaultyCluster, Key
from scripts.faults.load import send_all

ROUTER_ARGS: Final = ("--heartbeat-ms", "200")
WORKER_ARGS: Final = ("--hash-step-ms", "6", "--max-ubatch-tokens", "256", "--num-blocks", "3000")
KV_BYTES_PER_S: Final = 2_000_000
HOLD_S: Final = 0.2
LOOK_S: Final = 0.02
# A state that did not come in this time is left for later.
PATIENCE_S: Final = 3.0

Rows = dict[Key, dict[str, Any]]
Point = Callable[[FaultyCluster, Rows, list[Record]], set[Key]]


def reading(cluster: FaultyCluster, rows: Rows, records: list[Record]) -> set[Key]:
    """Prefill workers in the middle of a prompt."""
    return {key for key, row in rows.items() if key[0] == "prefill" and row["running"]}


def sending(cluster: FaultyCluster, rows: Rows, records: list[Record]) -> set[Key]:
    """Prefill workers whose KV is under way."""
    names = set().union(*[relay.senders() for relay in cluster.kv_relays.values()])
    return {key for key in cluster.keys if f"{key[0]}-{key[1]}" in names and key[0] == "prefill"}


def receiving(cluster: FaultyCluster, rows: Rows, records: list[Record]) -> set[Key]:
    """Decode workers that KV is under way to."""
    return {key for key, relay in cluster.kv_relays.items() if relay.senders()}


def holding(cluster: FaultyCluster, rows: Rows, records: list[Record]) -> set[Key]:
    """Decode workers that hold blocks while a client has its first token and not its second."""
    if not any(record.is_held for record in records):
        return set()
    return {key for key, row in rows.items() if key[0] == "decode" and row["blocks"]["used"]}


def generating(cluster: FaultyCluster, rows: Rows, records: list[Record]) -> set[Key]:
    """Decode workers in the middle of a text."""
    return {key for key, row in rows.items() if key[0] == "decode" and row["running"]}


def handed_over(cluster: FaultyCluster, rows: Rows, records: list[Record]) -> set[Key]:
    """Prefill workers that read nothing but still hold blocks: the hand-over has not ended."""
    return {
        key
        for key, row in rows.items()
        if key[0] == "prefill" and not row["running"] and row["blocks"]["used"]
    }


POINTS: Final[dict[str, Point]] = {
    "prefill reads a prompt": reading,
    "prefill sends KV": sending,
    "prefill waits for the last ACK": handed_over,
    "decode receives KV": receiving,
    "decode holds KV for DECODE_REQUEST": holding,
    "decode generates": generating,
}


@dataclass
class Sweep:
    """What was killed where, and how many requests were open then."""

    kills: Counter[str] = field(default_factory=Counter)
    open_requests: list[int] = field(default_factory=list)
    seconds: float = 0.0


async def sweep(
    cluster: FaultyCluster,
    records: list[Record],
    *,
    seed: int,
    clients: int = 8,
    gap_s: tuple[float, float] = (1.0, 2.5),
    max_kills: int = 1_000_000,
) -> Sweep:
    """Send every record while workers are killed; return when all have ended."""
    for relay in cluster.kv_relays.values():
        relay.bytes_per_s = KV_BYTES_PER_S
    result, start = Sweep(), time.monotonic()
    load = asyncio.create_task(send_all(cluster, records, clients=clients, hold_s=HOLD_S))
    killer = asyncio.create_task(
        _kill_on(cluster, records, result, random.Random(seed), gap_s, max_kills)
    )
    try:
        await load
    finally:
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
    result.seconds = time.monotonic() - start
    return result


async def _kill_on(
    cluster: FaultyCluster,
    records: list[Record],
    result: Sweep,
    draw: random.Random,
    gap_s: tuple[float, float],
    max_kills: int,
) -> None:
    while sum(result.kills.values()) < max_kills:
        await asyncio.sleep(draw.uniform(*gap_s))
        await asyncio.to_thread(cluster.until_whole)
        # The least covered state first; ties are the seed's.
        names = sorted(POINTS, key=lambda name: (result.kills[name], draw.random()))
        for name in names:
            victim = await _meet(cluster, POINTS[name], records, draw)
            if victim is not None:
                result.open_requests.append(sum(record.is_open for record in records))
                cluster.workers[victim].kill()
                result.kills[name] += 1
                break


async def _meet(
    cluster: FaultyCluster, point: Point, records: list[Record], draw: random.Random
) -> Key | None:
    """Wait until some worker is in the state; return it, None if the state does not come."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        rows = await asyncio.to_thread(cluster.rows)
        if victims := point(cluster, rows, records):
            return draw.choice(sorted(victims))
        await asyncio.sleep(LOOK_S)
    return None
