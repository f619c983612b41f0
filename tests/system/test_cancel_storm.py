"""Cancels at every moment of a request leave nothing behind; `chaos.py --cancels` has more."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.faults import cancels
from tests.faults.checks import problems
from tests.faults.cluster import PERSISTENT, FaultyCluster


async def test_a_storm_of_cancels_leaves_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    with FaultyCluster(
        tmp_path, router_args=cancels.ROUTER_ARGS + PERSISTENT, worker_args=cancels.WORKER_ARGS
    ) as cluster:
        storm = await cancels.storm(cluster, 300, seed=3, clients=24)
        await asyncio.to_thread(cluster.until_idle)
    assert storm.bystanders
    assert problems(storm.bystanders) == []
    assert all(storm.cancels[name] for name in cancels.MOMENTS), storm.cancels
