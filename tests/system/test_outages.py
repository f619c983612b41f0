"""A worker that is frozen or cut off is missed in time, and a killed router is no silent end.

`scripts/chaos --outages` is the long run of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.faults import outages
from tests.faults.checks import problems
from tests.faults.clients import Record
from tests.faults.cluster import PERSISTENT, FaultyCluster
from tests.faults.load import draw_requests
from wire.options import Options


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    with FaultyCluster(
        tmp_path_factory.mktemp("outages"),
        router_args=("--heartbeat-ms", "300", *PERSISTENT),
        worker_args=("--hash-step-ms", "10"),
    ) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        (("decode", 0), outages.frozen),
        (("prefill", 0), outages.frozen),
        (("decode", 1), outages.black_holed),
    ],
    ids=["decode frozen", "prefill frozen", "decode in a black hole"],
)
async def test_a_worker_that_says_nothing_is_replaced_and_may_come_back(
    cluster: FaultyCluster, key: tuple[str, int], fault: outages.Fault
) -> None:
    """No request fails, and what the worker says when it wakes up doubles no token."""
    await asyncio.to_thread(cluster.until_whole)
    records = draw_requests(7, 24, prompt=(200, 2000), answer=(100, 150))
    await outages.outage(cluster, key, records, fault=fault, lasts_s=0.0)
    assert problems(records) == []
    await asyncio.to_thread(cluster.until_whole)
    await asyncio.to_thread(cluster.until_idle)


async def test_a_router_that_is_killed_ends_no_stream_silently(cluster: FaultyCluster) -> None:
    """Every client sees an error; a new router on the same ports serves, and nothing is leaked."""
    await asyncio.to_thread(cluster.until_whole)
    records = [
        Record([face, 1, 2], Options(ignore_eos=True), 2000, ("http", "tcp")[face % 2])
        for face in range(8)
    ]
    await outages.restart_router(cluster, records, after_tokens=5)
    assert problems(records, may_fail=True) == []
    assert all(record.error for record in records)
    await asyncio.to_thread(cluster.until_whole)
    await asyncio.to_thread(cluster.until_idle)
