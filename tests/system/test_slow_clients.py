"""Clients that do not read cost others nothing: they are cut by their timer, their blocks freed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.cluster import until
from tests.faults import slow
from tests.faults.checks import problems
from tests.faults.cluster import PERSISTENT, FaultyCluster
from tests.faults.slow import SlowClient


async def test_a_client_that_does_not_read_is_cut_and_its_blocks_are_free(tmp_path: Path) -> None:
    """Beside one that reads slowly, which is not cut, and two whose texts are whole and right."""
    with FaultyCluster(
        tmp_path,
        prefills=1,
        decodes=1,
        router_args=slow.ROUTER_ARGS + PERSISTENT,
        worker_args=("--hash-step-ms", "1"),
    ) as cluster:
        stalled, slowly = SlowClient(0, num_choices=8), SlowClient(20_000)
        tasks = [asyncio.create_task(client.run(cluster)) for client in (stalled, slowly)]
        try:
            records = await slow.beside(cluster, [], seed=1, clients=2, answer=100)
            await asyncio.to_thread(
                until, lambda: slow.num_cut(cluster) == 1, "one is cut", slow.CUT_IN_S
            )
            assert not slowly.was_cut
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(cluster.until_idle)
    assert slowly.read_bytes > 0
    assert problems(records) == []
