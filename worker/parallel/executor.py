"""The executor for one process of a model that is divided among several.

The engine calls the leader's executor, which broadcasts each step to the other processes, the
followers.  All processes compute; only the leader samples.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch

from worker.compute.ranks import Ranks
from worker.executor.contract import Capabilities, MemoryRequirements
from worker.executor.torch import Step, TorchExecutor, make_cache
from worker.model.config import ModelError, read_config
from worker.parallel.commands import Verb, send, send_step
from worker.parallel.follower import follow
from worker.parallel.kv_cache import ShardedKVCache
from worker.parallel.kv_copies import OwnPart, RemotePart, Steps
from worker.parallel.microbatches import compute, in_order, num_microbatches
from worker.parallel.partition import parts_of

log = structlog.get_logger("worker")


def create(
    *, model_path: str | Path, model_name: str, ranks: Ranks, **settings: Any
) -> ShardedExecutor:
    """Load this process's part of a model; see `TorchExecutor.load`.

    Raises:
        ModelError: As `TorchExecutor.load`, or the model cannot be divided into these parts.
        ConnectionError: The connection to another process was lost.
    """
    path = Path(model_path)
    executor = ShardedExecutor.load(path, name=model_name, ranks=ranks, **settings)
    try:
        executor.join(ranks, path)
    except RuntimeError as error:
        raise ConnectionError(f"the processes of this worker have parted: {error}") from error
    return executor


class ShardedExecutor(TorchExecutor):
    """Implements `worker.executor.contract.Executor` together with other processes."""

    _ranks: Ranks

    def join(self, ranks: Ranks, path: Path) -> None:
        """Wait until all processes have loaded their parts; then describe the whole model.

        Raises:
            ModelError: The processes differ in arithmetic, so they would not agree on the experts
                of a token whose scores they round differently.
        """
        if not ranks.agree(self.capabilities.arithmetic):
            raise ModelError(
                f"the processes of this worker compute differently, process {ranks.shard.process} "
                f"in {self.capabilities.arithmetic}; start them on processors of one kind, with "
                "the same --dtype and --weights"
            )
        self._ranks, shard = ranks, ranks.shard
        self._parts = parts_of(self.info.layout, read_config(path), shard.size, shard.stages)
        self._steps = Steps()
        self._remote_parts: list[RemotePart] = []
        self.capabilities = self._summed(self.capabilities)

    def _summed(self, own: Capabilities) -> Capabilities:
        """Return the capabilities of the whole model, from those of this process."""
        shard, memory = self._ranks.shard, own.memory
        number = shard.size * shard.stages
        limit = self.info.max_model_len
        of_parts = [MemoryRequirements.of(part.layout, limit) for part in self._parts]
        return replace(
            own,
            memory=replace(
                memory,
                parameter_bytes=self._ranks.total(memory.parameter_bytes),
                activation_bytes_per_token=number * memory.activation_bytes_per_token,
                kv_bytes_per_token=sum(it.kv_bytes_per_token for it in of_parts),
                window_bytes_per_token=sum(it.window_bytes_per_token for it in of_parts),
            ),
            num_shards=shard.size,
            num_stages=shard.stages,
        )

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> ShardedKVCache:
        assert self._model is not None, "allocate after shutdown"
        sizes = num_blocks, block_size, num_states, num_window_blocks
        send(self._ranks, Verb.ALLOCATE, *sizes)
        own, *others = self._parts
        self._cache = make_cache(self._model, own.layout, *sizes)
        self._remote_parts = [RemotePart(self._ranks, part, self._steps) for part in others]
        mine = own, OwnPart(self._cache, own)
        theirs = zip(others, self._remote_parts, strict=True)
        return ShardedKVCache(self.info.layout, self._cache, [mine, *theirs])

    def _compute(self, step: Step) -> torch.Tensor:
        assert self._model is not None and self._cache is not None
        stages, has_states = self._ranks.shard.stages, self.info.layout.has_state
        microbatches = num_microbatches(len(step.token_ids), stages, has_states=has_states)
        step = step._replace(num_microbatches=microbatches)
        send_step(self._ranks, step)
        logits = in_order(step, compute(self._model, self._cache, step))
        self._steps.add()
        return logits

    def follow(self) -> None:
        """Execute the leader's commands until it ends; see `worker.parallel.follower`."""
        assert self._model is not None
        follow(self._model, self._parts[self._ranks.shard.process], self._ranks)

    def shutdown(self) -> None:
        """Free the weights and the KV cache, and end the other processes."""
        if self._model is not None:
            try:
                self._end()
            except RuntimeError as error:  # others have died
                log.warning("the processes of the model have parted", reason=str(error))
        super().shutdown()

    def _end(self) -> None:
        self._ranks.is_ending = True
        send(self._ranks, Verb.END)
        for remote_part in self._remote_parts:
            remote_part.end()
        self._ranks.leave()
