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
from pathlib import Path
from typing import Any, Final

from tests.faults.clients import Record
from tests.faults.cluster import FaultyCluster, Key
from tests.faults.load import send_all

ROUTER_ARGS: Final = ("--heartbeat-ms", "100")
WORKER_ARGS: Final = ("--hash-step-ms", "6", "--max-ubatch-tokens", "256", "--num-blocks", "3000")
# How KV gets from worker to worker.
KV_ARGS: Final = {
    "sockets": ("--kv-shared-memory", "off", "--kv-unasked-bytes", "0"),
    "offer": ("--kv-shared-memory", "off"),
    "memory": ("--kv-unasked-bytes", "0"),
}
KV_BYTES_PER_S: Final = 2_000_000
KV_DELAY_S: Final = 0.03  # each way: the last ACK takes as long
HOLD_S: Final = 0.2
LOOK_S: Final = 0.02
# A state that did not come in this time is left for later.
PATIENCE_S: Final = 2.0

Rows = dict[Key, dict[str, Any]]
Point = Callable[[FaultyCluster, Rows, list[Record]], set[Key]]


def reading(cluster: FaultyCluster, rows: Rows, records: list[Record]) -> set[Key]:
    """Prefill workers in the middle of a prompt."""
    return {key for key, row in rows.items() if key[0] == "prefill" and row["running"]}


def sending(cluster: FaultyCluster, rows: Rows, records: list[Record]) -> set[Key]:
    """Prefill workers whose KV is under way."""
    return _named(cluster, *[relay.senders() for relay in cluster.kv_relays.values()])


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


def awaiting_ack(cluster: FaultyCluster, rows: Rows, records: list[Record]) -> set[Key]:
    """Prefill workers that a KV_CACHE_ACK is under way to."""
    return _named(cluster, *[relay.awaiting() for relay in cluster.kv_relays.values()])


def _named(cluster: FaultyCluster, *names: set[str]) -> set[Key]:
    found = set[str]().union(*names)
    return {(role, rank) for role, rank in cluster.keys if f"{role}-{rank}" in found}


POINTS: Final[dict[str, Point]] = {
    "prefill reads a prompt": reading,
    "prefill sends KV": sending,
    "prefill waits for an ACK": awaiting_ack,
    "decode receives KV": receiving,
    "decode holds KV for DECODE_REQUEST": holding,
    "decode generates": generating,
}


@dataclass
class Sweep:
    """The kills by state, and how many requests were open at each."""

    kills: Counter[str] = field(default_factory=Counter)
    open_requests: list[int] = field(default_factory=list)
    seconds: float = 0.0


def shape(cluster: FaultyCluster) -> None:
    """Give the KV links a rate and a delay, so that a transfer lasts."""
    for relay in cluster.kv_relays.values():
        relay.bytes_per_s, relay.delay_s = KV_BYTES_PER_S, KV_DELAY_S


async def sweep(
    cluster: FaultyCluster,
    records: list[Record],
    *,
    seed: int,
    clients: int = 8,
    gap_s: tuple[float, float] = (0.5, 2.0),
) -> Sweep:
    """Send every record while workers are killed; return when all have ended."""
    shape(cluster)
    result, start = Sweep(), time.monotonic()
    load = asyncio.create_task(send_all(cluster, records, clients=clients, hold_s=HOLD_S))
    killer = asyncio.create_task(_kill_on(cluster, records, result, random.Random(seed), gap_s))
    try:
        await load
    finally:
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
    result.seconds = time.monotonic() - start
    return result


def mapped(cluster: FaultyCluster) -> set[int]:
    """How many memories of other processes the decode workers have mapped to read."""
    pids = [it.pid for (role, _), it in cluster.workers.items() if role == "decode"]
    maps = [Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in pids]
    return {sum("memfd:baton-kv" in row and " r--s " in row for row in rows) for rows in maps}


async def kill_at(
    cluster: FaultyCluster,
    name: str,
    records: list[Record],
    draw: random.Random,
    is_over: Callable[[], bool],
) -> Key | None:
    """Wait until some worker is in this state, and kill it; None: `is_over` came first."""
    while not is_over():
        rows = await asyncio.to_thread(cluster.rows)
        if victims := POINTS[name](cluster, rows, records):
            victim = draw.choice(sorted(victims))
            cluster.workers[victim].kill()
            return victim
        await asyncio.sleep(LOOK_S)
    return None


async def _kill_on(
    cluster: FaultyCluster,
    records: list[Record],
    result: Sweep,
    draw: random.Random,
    gap_s: tuple[float, float],
) -> None:
    while True:
        await asyncio.sleep(draw.uniform(*gap_s))
        await asyncio.to_thread(cluster.until_whole)
        # The least covered state first; ties are the seed's.
        names = sorted(POINTS, key=lambda name: (result.kills[name], draw.random()))
        for name in names:
            if await kill_at(cluster, name, records, draw, _timer(PATIENCE_S)):
                result.open_requests.append(sum(record.is_open for record in records))
                result.kills[name] += 1
                break


def _timer(seconds: float) -> Callable[[], bool]:
    """Return what says whether so much time has passed since now."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end
