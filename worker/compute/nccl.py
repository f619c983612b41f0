"""Hidden states and sums between GPUs: NCCL, by torch.distributed.  It has never run.

NCCL's own connections are not sealed; between machines they need a trusted network.  The GPUs of
one machine meet in memory that only this user can open.
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
    # Public as torch.distributed.Store, where its type cannot be found.
    from torch._C._distributed_c10d import Store


Broadcast = Callable[[torch.Tensor], None]


class NCCL:
    def __init__(
        self, shard: Shard, connection: socket.socket, timeout_s: float, broadcast: Broadcast
    ) -> None:
        """Meet the others; `connection` and `broadcast` as in `common_store`."""
        import torch.distributed as dist  # slow, and only needed with GPUs

        self._dist, count = dist, shard.size * shard.stages
        dist.init_process_group(
            "nccl",
            store=common_store(shard.process, count, connection, broadcast),
            rank=shard.process,
            world_size=count,
            timeout=timedelta(seconds=timeout_s),
        )
        self._sending: dist.Work | None = None
        for stage in range(shard.stages):  # every process must create every group
            first = replace(shard, rank=0, stage=stage).process
            members = [*range(first, first + shard.size)]
            group = dist.new_group(members, timeout=timedelta(seconds=timeout_s))
            if stage == shard.stage:
                self._first, self._stage = first, group

    def gather_all(self, tensor: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Fill the parts with the tensor of each shard of the stage."""
        self._dist.all_gather(parts, tensor, group=self._stage)

    def gather(self, columns: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Fill the parts, in the stage's first process, with the columns of each shard."""
        self._dist.gather(columns, parts or None, dst=self._first, group=self._stage)

    def send(self, hidden: torch.Tensor, process: int) -> None:
        """Send hidden states to a process, once it has those of the step before."""
        if self._sending is not None:
            self._sending.wait()
        self._sending = self._dist.isend(hidden, process)  # which keeps the tensor

    def receive(self, hidden: torch.Tensor, process: int) -> None:
        self._dist.recv(hidden, process)

    def leave(self) -> None:
        """Finish sending, and leave the group."""
        if self._sending is not None:
            self._sending.wait()
        self._dist.destroy_process_group()


def common_store(
    process: int, count: int, connection: socket.socket, broadcast: Broadcast
) -> Store:
    """Return a store that all processes share, in which NCCL finds the others.

    Args:
        connection: A connection between process 0 and another, for their addresses.
        broadcast: Broadcasts process 0's numbers.
    """
    from torch._C._distributed_c10d import FileStore, TCPStore

    where = torch.zeros(2, dtype=torch.int64)
    if connection.family == socket.AF_UNIX:
        if process == 0:
            where = torch.tensor([os.getpid(), os.memfd_create("baton-nccl")])
        broadcast(where)
        return FileStore("/proc/{}/fd/{}".format(*where.tolist()), count)
    if process == 0:
        host = connection.getsockname()[0]
        store = TCPStore(host, 0, count, is_master=True, wait_for_workers=False)
        where[0] = store.port
        broadcast(where)
        return store
    broadcast(where)
    return TCPStore(connection.getpeername()[0], int(where[0]), count, is_master=False)
