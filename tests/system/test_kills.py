"""A worker that is killed in any state of a request costs no client anything.

`scripts/chaos --kill-sweep` is the long run of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import count

import pytest

from tests.faults import kills
from tests.faults.checks import problems
from tests.faults.cluster import PERSISTENT, FaultyCluster
from tests.faults.load import draw_requests, send_all


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    directory = tmp_path_factory.mktemp("kills")
    with FaultyCluster(
        directory, router_args=kills.ROUTER_ARGS + PERSISTENT, worker_args=kills.WORKER_ARGS
    ) as cluster:
        kills.shape(cluster)
        yield cluster


@pytest.mark.parametrize("name", kills.POINTS)
async def test_a_worker_killed_while(cluster: FaultyCluster, name: str) -> None:
    """2 prefill and 2 decode workers, 6 clients: every text is that of a run without a fault."""
    await asyncio.to_thread(cluster.until_whole)
    for seed in count(len(name)):  # until a worker was seen in this state
        records = draw_requests(seed, 24, prompt=(500, 2500), answer=(20, 80))
        load = asyncio.create_task(send_all(cluster, records, clients=6, hold_s=kills.HOLD_S))
        victim = await kills.kill_at(cluster, name, records, random.Random(name), load.done)
        await load
        assert problems(records) == []
        if victim is not None:
            break
    await asyncio.to_thread(cluster.until_whole)
    await asyncio.to_thread(cluster.until_idle)


async def test_the_only_decode_worker_killed(cluster: FaultyCluster) -> None:
    """Nobody is left to take over: requests wait until one is back, and go on."""
    await asyncio.to_thread(cluster.until_whole)
    records = draw_requests(1, 12, prompt=(200, 1000), answer=(50, 100))
    load = asyncio.create_task(send_all(cluster, records, clients=6))
    await asyncio.gather(*[record.until_tokens(2) for record in records[:6]])
    cluster.workers["decode", 0].kill()
    cluster.workers["decode", 1].kill()
    await load
    assert problems(records) == []
