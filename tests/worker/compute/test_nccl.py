"""The store in which GPUs meet before NCCL; without GPUs no more can run."""

from __future__ import annotations

import socket

import psutil

from tests.worker.compute.processes import Processes
from worker.compute.nccl import common_store
from worker.compute.ranks import Ranks


def share(ranks: Ranks) -> tuple[bytes, list[str]]:
    with socket.socket(socket.AF_UNIX) as beside:
        store = common_store(ranks.shard.process, 3, beside, ranks.broadcast)
    if ranks.is_leader:
        store.set("word", "7")
    ports = [it for it in psutil.Process().net_connections("tcp") if it.status == "LISTEN"]
    found = store.get("word"), [str(it) for it in ports]
    assert ranks.total(1) == 3  # all have read it
    return found


def test_processes_of_one_machine_share_a_store_that_nobody_can_connect_to(
    processes: Processes,
) -> None:
    assert processes.run(3, 1, share) == [(b"7", [])] * 3
