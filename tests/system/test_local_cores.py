"""Local workers run on the cores that `/v1/cluster` names."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from wire.process.cores import format_cores

ROLES = ("prefill", "decode")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores are chosen on Linux only")


def computes(cluster: Cluster, role: str) -> dict[str, Any]:
    """The worker's row, which has to be true of its process."""
    row = cluster.ready(role, 0)
    [pid] = cluster.local_pids(role, 0)
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # a thread may end meanwhile
            assert row["computes"]["cores"] == format_cores(os.sched_getaffinity(int(thread)))
    return row["computes"]  # type: ignore[no-any-return]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_workers_may_have_cores_of_their_own(tmp_path: Path) -> None:
    flags = ("--local-cores", "split", "--worker-args", "--threads 1")
    with Cluster(tmp_path, args=flags) as cluster:
        rows = [computes(cluster, role) for role in ROLES]
        assert rows[0]["arithmetic"] == rows[1]["arithmetic"] and rows[0]["threads"] == 1
        pids = [cluster.local_pids(role, 0)[0] for role in ROLES]
        assert not os.sched_getaffinity(pids[0]) & os.sched_getaffinity(pids[1])
