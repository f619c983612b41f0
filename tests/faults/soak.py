"""Hours of mixed load with a fault every few seconds, while somebody looks at what processes hold.

Rank 0 of each role and the router live through all of it, whatever happens around them: cut links,
black holes, frozen and killed neighbours, cancelled requests.  So what they hold can be compared
from the first minute to the last.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from tests.faults import cancels
from tests.faults.clients import Record
from tests.faults.cluster import FaultyCluster, Usage
from tests.faults.load import draw_requests, send_all

ROUTER_ARGS: Final = ("--heartbeat-ms", "500")
WORKER_ARGS: Final = ("--hash-step-ms", "10", "--max-ubatch-tokens", "256", "--num-blocks", "3000")
CLIENTS: Final = 4
SAMPLE_S: Final = 5.0
SURVIVORS: Final = ("prefill-0", "decode-0", "router")  # who is never killed


@dataclass
class Soak:
    """Everything that was asked, done and seen; `samples` are (seconds, what each process held)."""

    records: list[Record] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    cancels: int = 0
    samples: list[tuple[float, dict[str, Usage]]] = field(default_factory=list)

    def series(self, name: str) -> list[Usage]:
        return [usage[name] for _, usage in self.samples if name in usage]


async def soak(cluster: FaultyCluster, minutes: float, *, seed: int) -> Soak:
    """Load, cancel and hurt for so long, then let every request end."""
    result, stop = Soak(), asyncio.Event()
    draw = random.Random(seed)
    chores = [
        asyncio.create_task(chore)
        for chore in (
            _ask(cluster, result, seed, stop),
            _cancel(cluster, result, seed, stop),
            _hurt(cluster, result, draw, stop),
            _look(cluster, result, stop),
        )
    ]
    await asyncio.wait(chores, timeout=60 * minutes, return_when=asyncio.FIRST_EXCEPTION)
    stop.set()
    await asyncio.gather(*chores)
    return result


async def _ask(cluster: FaultyCluster, result: Soak, seed: int, stop: asyncio.Event) -> None:
    rounds = 0
    while not stop.is_set():
        rounds += 1
        records = draw_requests(seed + rounds, 4 * CLIENTS, prompt=(10, 2500), answer=(1, 100))
        result.records += records
        await send_all(cluster, records, clients=CLIENTS, hold_s=0.05)


async def _cancel(cluster: FaultyCluster, result: Soak, seed: int, stop: asyncio.Event) -> None:
    while not await _sleep(stop, 3.0):
        seed += 1
        storm = await cancels.storm(cluster, 20, seed=seed, clients=2, bystanders=0)
        result.cancels += storm.total


async def _hurt(
    cluster: FaultyCluster, result: Soak, draw: random.Random, stop: asyncio.Event
) -> None:
    while not await _sleep(stop, draw.uniform(5.0, 15.0)):
        name = draw.choice(list(FAULTS))
        await FAULTS[name](cluster, draw)
        result.faults[name] += 1
        await asyncio.to_thread(cluster.until_whole)


async def _look(cluster: FaultyCluster, result: Soak, stop: asyncio.Event) -> None:
    start = time.monotonic()
    while not await _sleep(stop, SAMPLE_S):
        held = await asyncio.to_thread(cluster.usage, SURVIVORS)
        result.samples.append((time.monotonic() - start, held))


async def _kill(cluster: FaultyCluster, draw: random.Random) -> None:
    cluster.workers[draw.choice(["prefill", "decode"]), 1].kill()


async def _freeze(cluster: FaultyCluster, draw: random.Random) -> None:
    key = draw.choice(["prefill", "decode"]), 1
    cluster.freeze(*key)
    await asyncio.sleep(draw.uniform(0.2, 5.0))
    cluster.thaw(*key)


async def _cut_bus(cluster: FaultyCluster, draw: random.Random) -> None:
    cluster.bus_relays[draw.choice(cluster.keys)].cut()


async def _cut_kv(cluster: FaultyCluster, draw: random.Random) -> None:
    draw.choice(list(cluster.kv_relays.values())).cut()


async def _black_hole_bus(cluster: FaultyCluster, draw: random.Random) -> None:
    relay = cluster.bus_relays[draw.choice(cluster.keys)]
    relay.is_black_hole = True
    await asyncio.sleep(draw.uniform(0.2, 4.0))
    relay.is_black_hole = False


async def _slow_kv(cluster: FaultyCluster, draw: random.Random) -> None:
    relay = draw.choice(list(cluster.kv_relays.values()))
    relay.delay_s, relay.bytes_per_s = 0.05, 1_000_000
    await asyncio.sleep(draw.uniform(1.0, 5.0))
    relay.delay_s, relay.bytes_per_s = 0.0, 0


FAULTS: Final[dict[str, Callable[[FaultyCluster, random.Random], Awaitable[None]]]] = {
    "worker killed": _kill,
    "worker frozen": _freeze,
    "bus cut": _cut_bus,
    "KV link cut": _cut_kv,
    "bus black-holed": _black_hole_bus,
    "KV link slow": _slow_kv,
}


async def _sleep(stop: asyncio.Event, seconds: float) -> bool:
    """Wait; True when it is time to stop."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True
