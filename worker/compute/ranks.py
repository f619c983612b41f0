"""The processes that compute one model together, and what they send each other during a step.

All that knows torch.distributed, with `worker.compute.meeting`: gloo between CPUs, NCCL between
GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Final
from zlib import crc32

import torch
import torch.distributed as dist

from worker.compute.meeting import meet
from worker.model.shard import Shard

# What has to be the same: where there are fewer GPUs than processes, `auto` gives one of them none.
_DEVICE: Final = (
    "the kind of device (a GPU for each process, or --device cpu where there are fewer)"
)


class Ranks:
    """One process among those of a model; all must call the same methods in the same order.

    A method raises RuntimeError if another process has died: at once between CPUs, as its
    connections close.
    """

    def __init__(
        self,
        shard: Shard,
        rendezvous: str,
        device: torch.device,
        timeout_s: float,
        settings: Mapping[str, object] | None = None,
    ):
        """Wait until all processes have come.

        Args:
            rendezvous: A URL that all are given: tcp://host:port of process 0, file:///a/new/file.
            timeout_s: How long to wait, here and within a step, before the others count as dead.
            settings: What else must be the same in all; see `worker.compute.meeting`.

        Raises:
            ValueError: They do not belong together.
            TimeoutError: Not all have come.
        """
        self.shard, count = shard, shard.size * shard.stages
        backend = "nccl" if device.type == "cuda" else "gloo"
        ours = {
            "--tensor-parallel": shard.size,
            "--pipeline-parallel": shard.stages,
            _DEVICE: device.type,
            "the release of torch": torch.__version__,
            **(settings or {}),
        }
        dist.init_process_group(
            backend,
            store=meet(rendezvous, shard.process, count, ours, timeout_s),
            rank=shard.process,
            world_size=count,
            timeout=timedelta(seconds=timeout_s),
        )
        # Orders lie in host memory; between two requests the leader may send none for long.
        self._all = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self._sending: dist.Work | None = None
        # Copies of KV take other connections than steps, which they must not wait for.
        self._pairs, self._watches = (
            {
                it: dist.new_group([0, it], backend="gloo", timeout=timedelta(days=365))
                for it in range(1, count)
            }
            for _ in range(2)
        )
        self.is_ending = False  # set before others are told to end: their going is no loss then
        for stage in range(shard.stages):  # everybody has to make everybody's groups
            first = replace(shard, rank=0, stage=stage).process
            members, timeout = [*range(first, first + shard.size)], timedelta(seconds=timeout_s)
            group = dist.new_group(members, timeout=timeout)  # by itself it has torch's own
            if stage == shard.stage:
                self._first, self._stage = first, group
        self.total(0)  # nobody needs the rendezvous any more

    @property
    def is_leader(self) -> bool:
        """Whether this process tells the others what to do."""
        return self.shard.process == 0

    def watch(self, process: int) -> None:
        """In the leader: wait until another process has gone.

        Raises:
            RuntimeError: It has died, and not ended as it was told to.
        """
        try:
            dist.recv(torch.empty(1), process, group=self._watches[process])
        except RuntimeError:
            if not self.is_ending:
                raise

    def leave(self) -> None:
        """Part from the others, who have got all that was sent; what else they wait for fails."""
        if self._sending is not None:
            self._sending.wait()
        dist.destroy_process_group()

    def broadcast(self, numbers: torch.Tensor) -> None:
        """Replace numbers in host memory by those of the leader, process 0."""
        dist.broadcast(numbers, 0, group=self._all)

    def total(self, number: int) -> int:
        """Return the sum of every process's number."""
        numbers = torch.tensor(number)
        dist.all_reduce(numbers, group=self._all)
        return int(numbers)

    def agree(self, text: str) -> bool:
        """Return whether all processes say the same."""
        number = torch.tensor([crc32(text.encode())])
        numbers = [torch.empty_like(number) for _ in range(dist.get_world_size())]
        dist.all_gather(numbers, number, group=self._all)
        return len({int(it) for it in numbers}) == 1

    def hand(self, tensor: torch.Tensor, process: int) -> None:
        """Send a tensor in host memory from the leader to a process, or back to it (0)."""
        dist.send(tensor, process, group=self._pairs[process or self.shard.process])

    def take(self, tensor: torch.Tensor, process: int) -> None:
        """Fill a tensor with what a process, or to it the leader (0), hands over."""
        dist.recv(tensor, process, group=self._pairs[process or self.shard.process])

    def add_up(self, summand: torch.Tensor) -> None:
        """Replace the summand of each shard of the stage by the sum."""
        if self.shard.size == 1:
            return
        if self.shard.size == 2:
            dist.all_reduce(summand, group=self._stage)
            return
        # A reduction adds three or more in an order that depends on where in the batch a row is;
        # here every row is added up in the order of the shards, whoever shares the batch.
        summands = [torch.empty_like(summand) for _ in range(self.shard.size)]
        dist.all_gather(summands, summand, group=self._stage)
        torch.add(summands[0], summands[1], out=summand)
        for other in summands[2:]:
            summand += other

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """Put the [R, C] of each shard of the stage side by side, in the stage's first process.

        Returns:
            [R, size * C]; in the other processes [0, size * C].
        """
        size, (num_rows, num_columns) = self.shard.size, columns.shape
        if size == 1:
            return columns
        if self.shard.rank > 0 or num_rows == 0:
            if num_rows > 0:
                dist.gather(columns, dst=self._first, group=self._stage)
            return columns.new_empty(0, size * num_columns)
        parts = columns.new_empty(size, num_rows, num_columns)
        dist.gather(columns, list(parts.unbind()), dst=self._first, group=self._stage)
        return parts.transpose(0, 1).reshape(num_rows, -1)

    def send(self, hidden: torch.Tensor) -> None:
        """Hand hidden states to the next stage, without waiting until it wants them.

        Those of the step before have to be gone: a stage is never more than one step ahead.
        """
        if self._sending is not None:
            self._sending.wait()
        self._sending = dist.isend(hidden, self._beside(1))  # which keeps the tensor

    def receive(self, hidden: torch.Tensor) -> None:
        """Fill `hidden` with what the stage before hands on."""
        dist.recv(hidden, self._beside(-1))

    def _beside(self, stages: int) -> int:
        """Return the process of the same shard, so many stages on."""
        return replace(self.shard, stage=self.shard.stage + stages).process
