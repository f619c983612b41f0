"""A worker that is frozen, a link that passes nothing, a router that is killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import httpx

from tests.cluster import START_S, until
from tests.faults.clients import Record, ask_http
from tests.faults.cluster import FaultyCluster, Key
from tests.faults.load import send_all
from wire.options import Options

Fault = Callable[[FaultyCluster, Key], AbstractContextManager[None]]


@dataclass
class Outage:
    """Seconds until nothing new was placed on it, until it was lost, and from the end till back."""

    suspected_s: float = 0.0
    detected_s: float = 0.0
    back_s: float = 0.0


@contextmanager
def frozen(cluster: FaultyCluster, key: Key) -> Iterator[None]:
    cluster.freeze(*key)
    try:
        yield
    finally:
        cluster.thaw(*key)


@contextmanager
def black_holed(cluster: FaultyCluster, key: Key) -> Iterator[None]:
    """The worker's link to the router passes nothing; neither end is told."""
    relay = cluster.bus_relays[key]
    relay.is_black_hole = True
    try:
        yield
    finally:
        relay.is_black_hole = False


async def outage(
    cluster: FaultyCluster,
    key: Key,
    records: list[Record],
    *,
    fault: Fault,
    lasts_s: float,
    clients: int = 8,
) -> Outage:
    """Send every record while one worker is out for `lasts_s`; return when all have ended."""
    result = Outage()
    load = asyncio.create_task(send_all(cluster, records, clients=clients, hold_s=0.05))

    def is_used() -> bool:
        if key[0] == "prefill":  # it has a request for some milliseconds, too short to be seen
            return cluster.status()["router"]["running"] > 0  # type: ignore[no-any-return]
        row = cluster.find(*key)
        return row is not None and row["placed"] > 0

    def have_outage() -> None:
        until(is_used, f"{key} is used")
        with fault(cluster, key):
            start = time.monotonic()
            until(lambda: cluster.find(*key) is None, f"{key} is suspect")
            result.suspected_s = time.monotonic() - start
            until(lambda: cluster.find(*key, state="lost") is not None, f"{key} is lost")
            result.detected_s = time.monotonic() - start
            time.sleep(max(0.0, lasts_s - result.detected_s))
        start = time.monotonic()
        until(lambda: cluster.find(*key) is not None, f"{key} is back")
        result.back_s = time.monotonic() - start

    await asyncio.gather(load, asyncio.to_thread(have_outage))
    return result


@dataclass
class Restart:
    """Seconds from the start of the new router process until it listens, and until it answers."""

    listening_s: float = 0.0
    serving_s: float = 0.0


async def restart_router(
    cluster: FaultyCluster, records: list[Record], *, after_tokens: int
) -> Restart:
    """Send all at once, kill the router when each has `after_tokens`, start it again, use it.

    Returns when every record has its end and a new request was answered.
    """
    load = asyncio.create_task(send_all(cluster, records, clients=len(records)))
    await asyncio.gather(*[record.until_tokens(after_tokens) for record in records])
    cluster.kill_router()
    await load
    result, start = Restart(), time.monotonic()
    cluster.start_router()
    async with httpx.AsyncClient(base_url=cluster.http, timeout=10, trust_env=False) as client:
        while True:
            probe = Record([1, 2, 3], Options(ignore_eos=True), 4, "http")
            await ask_http(client, probe)
            if not result.listening_s and not probe.error.startswith("connection"):
                result.listening_s = time.monotonic() - start
            if probe.finish:
                result.serving_s = time.monotonic() - start
                return result
            if time.monotonic() - start > START_S:
                raise TimeoutError(f"the new router does not serve: {probe.error}")
            await asyncio.sleep(0.02)
