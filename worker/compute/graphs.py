"""Decode steps on a GPU as CUDA graphs: one launch where the host would start hundreds.

A graph is recorded for each of a few batch sizes, the first time it is needed; a smaller batch is
padded, a larger one is computed as any other step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kernels import PagedBatch
from kernels.contract import Windowed
from kernels.cuda.plan import FixedPlan
from worker.compute.kv_cache import TorchKVCache
from worker.compute.model import Model

# Batch sizes that are recorded: no batch is padded to more than twice its size.
SIZES = (1, 2, 4, 8, *range(16, 257, 16))

Step = Callable[[], torch.Tensor]
# Takes a step; returns what repeats it, and the tensor that then has the result.
Record = Callable[[Step], tuple[Callable[[], None], torch.Tensor]]


class _Recorded(NamedTuple):
    token_ids: torch.Tensor
    positions: torch.Tensor
    plan: FixedPlan
    window_plan: FixedPlan | None
    replay: Callable[[], None]
    logits: torch.Tensor


class DecodeGraphs:
    """A model's `forward` for steps in which every sequence generates one token."""

    def __init__(
        self,
        model: Model,
        cache: TorchKVCache,
        *,
        max_model_len: int,
        wanted_blocks: int,
        record: Record,
    ) -> None:
        """Prepare; nothing is recorded yet.

        Args:
            cache: It has a spare block in each pool, which no sequence owns.
            wanted_blocks: Thread blocks that fill the device.
            record: `record_graph`, or a stand-in for it where there is no GPU.
        """
        self._model, self._cache = model, cache
        self._num_columns = -(-max_model_len // cache.block_size)
        self._wanted_blocks = wanted_blocks
        self._record = record
        self._recorded: dict[int, _Recorded] = {}

    @staticmethod
    def can_replay(num_rows: int, batch: PagedBatch) -> bool:
        """Whether each sequence of a step has one token, whose logits are wanted."""
        num_sequences = len(batch.context_lens)
        return bool(len(batch.slots) == num_rows == num_sequences <= SIZES[-1])

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Compute one step that `can_replay` allows.

        Args:
            token_ids: [T] int32; `positions` likewise, both in CPU memory.

        Returns:
            [T, vocab] float32 logits, valid until the next step.
        """
        count = len(token_ids)
        size = next(size for size in SIZES if size >= count)
        it = self._recorded.get(size)
        if it is None:
            it = self._recorded[size] = self._make(size)
        it.token_ids[:count].copy_(token_ids)
        it.positions[:count].copy_(positions)
        it.plan.set(batch)
        if it.window_plan is not None and batch.windowed is not None:
            it.window_plan.set(batch.windowed.batch)
        it.replay()
        return it.logits[:count]

    def _make(self, size: int) -> _Recorded:
        model, cache = self._model, self._cache
        windows = {*model.config.windows} - {None}
        token_ids, positions = torch.zeros(2, size, dtype=torch.int32, device=cache.pool.device)
        rows = torch.arange(size, device=cache.pool.device)
        plan, window_plan = self._plan(size, cache.pool, cache.num_blocks, {None}), None
        batch = plan.batch
        if cache.window_pool is not None:
            spare_block = cache.window_blocks.num_blocks
            window_plan = self._plan(size, cache.window_pool, spare_block, windows)
            batch = replace(batch, windowed=Windowed(cache.window_pool, window_plan.batch))
        replay, logits = self._record(
            lambda: model.forward(token_ids, positions, cache.pool, batch, rows)
        )
        return _Recorded(token_ids, positions, plan, window_plan, replay, logits)

    def _plan(
        self, size: int, pool: torch.Tensor, spare_block: int, windows: set[int | None]
    ) -> FixedPlan:
        return FixedPlan(
            pool,
            size,
            self._num_columns,
            self._model.config.num_heads,
            windows,
            spare_block=spare_block,
            wanted_blocks=self._wanted_blocks,
        )


def graphs_of(model: Model, cache: TorchKVCache, max_model_len: int) -> DecodeGraphs | None:
    """Return the graphs of a model on a GPU; None if its steps cannot be recorded."""
    if any(layer.experts or layer.delta for layer in model.config.layers):
        return None  # how many rows each expert has, the host waits for; states change their slots
    from kernels.cuda.backend import wanted_blocks

    return DecodeGraphs(
        model,
        cache,
        max_model_len=max_model_len,
        wanted_blocks=wanted_blocks(cache.pool.device.index or 0),
        record=record_graph,
    )


def record_graph(step: Step) -> tuple[Callable[[], None], torch.Tensor]:
    """Record a step as a CUDA graph."""
    # What only the first run compiles, loads or allocates must not happen while recording.
    aside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # Other threads go on copying KV, and may allocate for it.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()
    return graph.replay, result
