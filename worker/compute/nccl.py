"""Collectives and point-to-point sends between GPUs, by NCCL.  This module has never been run.

NCCL's connections are not encrypted; between machines they need a trusted network.  On one machine
the processes find each other through a file in memory that only this user can open.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from worker.model.shard import Shard

if TYPE_CHECKING:
    # mypy cannot resolve the public name, torch.distributed.Store.
    from torch._C._distributed_c10d import Store


Broadcast = Callable[[torch.Tensor], None]


class NCCL:
    def __init__(
        self, shard: Shard, connection: socket.socket, timeout_s: float, broadcast: Broadcast
    ) -> None:
        """Wait for all processes; see `common_store` for `connection` and `broadcast`."""
        import torch.distributed as dist  # imported late: slow, and only needed with GPUs

        self._dist, count = dist, shard.size * shard.stages
        dist.init_process_group(
            "nccl",
            store=common_store(shard.process, count, connection, broadcast),
            rank=shard.process,
            world_size=count,
            timeout=timedelta(seconds=timeout_s),
        )
        self._sending: dist.Work | None = None
        for stage in range(shard.stages):  # torch requires that every process creates every group
            first = replace(shard, rank=0, stage=stage).process
            members = [*range(first, first + shard.size)]
            group = dist.new_group(members, timeout=timedelta(seconds=timeout_s))
            if stage == shard.stage:
                self._first, self._stage = first, group

    def gather_all(self, tensor: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Fill `parts` with the `tensor` of each shard of the stage."""
        self._dist.all_gather(parts, tensor, group=self._stage)

    def gather(self, columns: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Fill `parts` in the stage's first process with each shard's `columns`."""
        self._dist.gather(columns, parts or None, dst=self._first, group=self._stage)

    def send(self, hidden: torch.Tensor, process: int) -> None:
        """Send hidden states asynchronously, after the previous send has completed."""
        if self._sending is not None:
            self._sending.wait()
        self._sending = self._dist.isend(hidden, process)  # keeps the tensor alive

    def receive(self, hidden: torch.Tensor, process: int) -> None:
        self._dist.recv(hidden, process)

    def leave(self) -> None:
        """Complete pending sends and destroy the process groups."""
        if self._sending is not None:
            self._sending.wait()
        self._dist.destroy_process_group()


def common_store(
    process: int, count: int, connection: socket.socket, broadcast: Broadcast
) -> Store:
    """Return a key-value store shared by all processes, where NCCL exchanges their addresses.

    Args:
        connection: Connects process 0 and another; the store uses its interface, or a file.
        broadcast: Replaces a tensor in every process by the one of process 0.
    """
    from torch._C._distributed_c10d import FileStore, TCPStore

    address = torch.zeros(2, dtype=torch.int64)
    if connection.family == socket.AF_UNIX:
        if process == 0:
            address = torch.tensor([os.getpid(), os.memfd_create("baton-nccl")])
        broadcast(address)
        return FileStore("/proc/{}/fd/{}".format(*address.tolist()), count)
    if process == 0:
        host = connection.getsockname()[0]
        store = TCPStore(host, 0, count, is_master=True, wait_for_workers=False)
        address[0] = store.port
        broadcast(address)
        return store
    broadcast(address)
    return TCPStore(connection.getpeername()[0], int(address[0]), count, is_master=False)
