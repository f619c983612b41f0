"""Communication between the processes that compute one model together.

CPUs use the connections of `worker.compute.rendezvous`; GPUs all-reduce and exchange hidden states
by NCCL (`worker.compute.nccl`).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Final
from zlib import crc32

import torch

from worker.compute.connection import Connection, ProcessLost, exchange
from worker.compute.handshake import Purpose
from worker.compute.nccl import NCCL
from worker.compute.rendezvous import connect
from worker.model.shard import Shard

# All processes must use the same kind: with fewer GPUs than processes, `auto` would mix them.
_DEVICE: Final = (
    "the kind of device (a GPU for each process, or --device cpu where there are fewer)"
)


class Ranks:
    """The communicator of one process; all processes call the same methods in the same order.

    Methods raise ProcessLost, a RuntimeError, as soon as another process has died.
    """

    def __init__(
        self,
        shard: Shard,
        rendezvous: str,
        device: torch.device,
        timeout_s: float,
        settings: Mapping[str, object] | None = None,
        secret: bytes = b"",
    ):
        """Connect to all other processes; see `worker.compute.rendezvous.connect`.

        A process is considered dead if another waits for it for `timeout_s`, here or in a step.
        """
        self.shard, self._timeout_s = shard, timeout_s
        own_settings = {
            "--tensor-parallel": shard.size,
            "--pipeline-parallel": shard.stages,
            _DEVICE: device.type,
            "the release of torch": torch.__version__,
            **(settings or {}),
        }
        self._connections = connect(rendezvous, shard, own_settings, timeout_s, secret)
        self._sender = ThreadPoolExecutor(1, "hand-on")
        self._sending: Future[None] | None = None
        self._gather_buffer = torch.empty(0, dtype=torch.uint8)
        self.is_ending = False  # the leader sets it before it tells the others to exit
        self._nccl = None
        if device.type == "cuda":
            first = next(iter(self._connections.values()))  # on followers the one to the leader
            self._nccl = NCCL(shard, first.socket, timeout_s, self.broadcast)
        self.total(0)  # a barrier: all processes have connected

    @property
    def is_leader(self) -> bool:
        return self.shard.process == 0

    def watch(self, process: int) -> None:
        """Block until another process exits (leader only); raise ProcessLost unless expected."""
        try:
            exchange([], [(self._connections[process, Purpose.WATCH], memoryview(bytearray(1)))])
        except ProcessLost:
            if not self.is_ending:
                raise

    def leave(self) -> None:
        """Complete pending sends and close the connections; peers still waiting get ProcessLost."""
        if self._sending is not None:
            self._sending.result()
        self._sender.shutdown()
        if self._nccl is not None:
            self._nccl.leave()
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def broadcast(self, numbers: torch.Tensor) -> None:
        """Overwrite `numbers`, in host memory, with the leader's; there is no timeout."""
        message = _bytes_of(numbers)
        if self.is_leader:
            exchange([(it, message) for it in self._others], [])
        else:
            exchange([], [(self._step(0), message)])

    def total(self, number: int) -> int:
        """Return the sum of the numbers of all processes."""
        return sum(self._collect(number))

    def agree(self, text: str) -> bool:
        """Return whether all processes passed the same text."""
        return len(set(self._collect(crc32(text.encode())))) == 1

    def _collect(self, number: int) -> list[int]:
        numbers = torch.zeros(self.shard.size * self.shard.stages, dtype=torch.int64)
        numbers[self.shard.process] = number
        messages = [_bytes_of(it) for it in numbers]
        if self.is_leader:
            exchange([], [(it, messages[it.peer]) for it in self._others])
        else:
            exchange([(self._step(0), messages[self.shard.process])], [])
        self.broadcast(numbers)
        return [int(it) for it in numbers]

    def send_to(self, tensor: torch.Tensor, process: int) -> None:
        """Send a tensor in host memory to `process`; one of the two must be the leader (0)."""
        exchange([(self._connections[process, Purpose.COPIES], _bytes_of(tensor))], [])

    def receive_from(self, tensor: torch.Tensor, process: int) -> None:
        """Receive a tensor that `process` sends with `send_to`."""
        exchange([], [(self._connections[process, Purpose.COPIES], _bytes_of(tensor))])

    def all_reduce(self, summand: torch.Tensor) -> None:
        """All-reduce `summand` in place among the stage's shards.

        All of them add in order of rank, so their sums are bit-identical.
        """
        if self.shard.size == 1:
            return
        summands = self._gather_all(summand)
        # Add where nothing is read after the first addition: ranks 0 and 1 in `summand`, which is
        # summands[0] or [1]; others in the buffer that received summands[0].
        total = summand if self.shard.rank < 2 else summands[0]
        torch.add(summands[0], summands[1], out=total)
        for other in summands[2:]:
            total += other
        if total is not summand:
            summand.copy_(total)

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """Concatenate [R, C] of each shard of the stage to [R, size * C] in its first process.

        Other processes return [0, size * C].
        """
        size, (num_rows, num_columns) = self.shard.size, columns.shape
        if size == 1:
            return columns
        is_first = self.shard.rank == 0
        parts = columns.new_empty(size, num_rows if is_first else 0, num_columns)
        if num_rows > 0:
            self._gather(columns, [*parts] if is_first else [])
        return parts.transpose(0, 1).reshape(-1, size * num_columns)

    def send(self, hidden: torch.Tensor) -> None:
        """Send hidden states to the next stage in the background, with one send in flight."""
        process = replace(self.shard, stage=self.shard.stage + 1).process
        if self._nccl is not None:
            return self._nccl.send(hidden, process)
        if self._sending is not None:
            self._sending.result()
        message = [(self._step(process), _bytes_of(hidden))]  # keeps the tensor alive
        self._sending = self._sender.submit(exchange, message, [], self._timeout_s)

    def receive(self, hidden: torch.Tensor) -> None:
        """Fill `hidden` with the output of the previous stage."""
        process = replace(self.shard, stage=self.shard.stage - 1).process
        if self._nccl is not None:
            return self._nccl.receive(hidden, process)
        exchange([], [(self._step(process), _bytes_of(hidden))], self._timeout_s)

    def _gather_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all shards of the stage, by rank, valid until the next call."""
        size, num_bytes = self.shard.size, tensor.numel() * tensor.itemsize
        if len(self._gather_buffer) < size * num_bytes:  # reused: a new one would cost page faults
            self._gather_buffer = tensor.new_empty(size * num_bytes, dtype=torch.uint8)
        parts = [
            self._gather_buffer[it * num_bytes : (it + 1) * num_bytes]
            .view(tensor.dtype)
            .view(tensor.shape)
            for it in range(size)
        ]
        if self._nccl is not None:
            self._nccl.gather_all(tensor, parts)
            return parts
        parts[self.shard.rank] = tensor
        others, message = self._stage_connections, _bytes_of(tensor)
        exchange(
            [(it, message) for it in others.values()],
            [(it, _bytes_of(parts[rank])) for rank, it in others.items()],
            self._timeout_s,
        )
        return parts

    def _gather(self, columns: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Fill `parts` in the stage's first process with each shard's `columns`."""
        if self._nccl is not None:
            return self._nccl.gather(columns, parts)
        if self.shard.rank > 0:
            return exchange([(self._stage_connections[0], _bytes_of(columns))], [], self._timeout_s)
        parts[0].copy_(columns)
        received = [(it, _bytes_of(parts[rank])) for rank, it in self._stage_connections.items()]
        exchange([], received, self._timeout_s)

    def _step(self, process: int) -> Connection:
        return self._connections[process, Purpose.STEPS]

    @property
    def _others(self) -> list[Connection]:
        return [self._step(it) for it in range(1, self.shard.size * self.shard.stages)]

    @property
    def _stage_connections(self) -> dict[int, Connection]:
        """The connections to the other shards of the stage, by their rank."""
        shards = (replace(self.shard, rank=it) for it in range(self.shard.size))
        return {it.rank: self._step(it.process) for it in shards if it.rank != self.shard.rank}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a byte view of a contiguous tensor in host memory, to send or to receive into."""
    assert tensor.is_contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().data
