"""Runs decode steps on a GPU as CUDA graphs: one launch instead of hundreds.

Before the worker serves, a graph is captured for each of a few batch sizes.  A batch between two
sizes is padded to the next one; a batch above the largest size runs without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import structlog
import torch

from kernels import PagedBatch
from kernels.contract import Windowed
from kernels.cuda import backend as cuda
from kernels.cuda.pinned import put
from kernels.cuda.plan import FixedPlan
from kernels.cuda.tiling import Gpu
from worker.compute.kv_cache import TorchKVCache
from worker.compute.model import Model
from worker.compute.transformer import Transformer

log = structlog.get_logger("worker")

# The captured batch sizes: no batch is padded to twice its size or more.
SIZES = (1, 2, 4, 8, *range(16, 257, 16))
# Progress is logged each time this many sizes have been captured.
_PROGRESS = 5


class DecodeStep:
    """A decode step of one batch size, with its input buffers, that a CUDA graph can capture.

    A CUDA graph refers to memory by address and keeps no tensor alive.  So every buffer that is
    allocated before capture is an attribute of this object, which must live as long as the graph.
    """

    def __init__(
        self,
        model: Transformer,
        cache: TorchKVCache,
        size: int,
        *,
        num_columns: int,
        gpu: Gpu,
        logits: torch.Tensor,
    ) -> None:
        """Allocate inputs for `size` sequences; `logits` is [size or more, vocab] float32."""
        self.logits = logits[:size]
        self._model, self._pool, device = model, cache.pool, cache.pool.device
        self._token_ids, self._positions = torch.zeros(2, size, dtype=torch.int32, device=device)
        plan = partial(
            FixedPlan,
            num_sequences=size,
            num_columns=num_columns,
            num_heads=model.config.num_heads,
            gpu=gpu,
        )
        self._plan = plan(cache.pool, windows={None}, spare_block=cache.num_blocks)
        self._batch, self._window_plan = self._plan.batch, None
        if cache.window_pool is not None:
            self._window_plan = plan(
                cache.window_pool,
                windows={*model.config.windows} - {None},
                spare_block=cache.window_blocks.num_blocks,
            )
            windowed = Windowed(cache.window_pool, self._window_plan.batch)
            self._batch = replace(self._batch, windowed=windowed)

    def set(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        drawn: torch.Tensor | None = None,
    ) -> None:
        """Copy a step's inputs to the captured buffers; see `DecodeGraphs.forward`."""
        count = len(token_ids)
        tables = [(self._token_ids[:count], token_ids.numpy())]
        tables += [(self._positions[:count], positions.numpy()), *self._plan.tables(batch)]
        if self._window_plan is not None and batch.windowed is not None:
            tables += self._window_plan.tables(batch.windowed.batch)
        put(tables)
        if drawn is not None:
            fill_in(self._token_ids[:count], drawn)

    def __call__(self) -> None:
        """Compute the step and write `logits`; called once to warm up and once to capture."""
        self._model.forward(
            self._token_ids, self._positions, self._pool, self._batch, rows=None, out=self.logits
        )


# Captures a step and returns a function that replays it; the step must outlive that function.
Record = Callable[[DecodeStep], Callable[[], None]]


class _Recorded(NamedTuple):
    step: DecodeStep
    replay: Callable[[], None]


class DecodeGraphs:
    """Replays CUDA graphs for steps in which every sequence generates one token."""

    def __init__(
        self,
        model: Transformer,
        cache: TorchKVCache,
        *,
        max_model_len: int,
        gpu: Gpu,
        record: Record,
    ) -> None:
        """Capture nothing yet; padding sequences will write to a spare block in each pool."""
        num_columns = -(-max_model_len // cache.block_size)
        device = cache.pool.device
        # All sizes share this buffer, because only one step runs at a time.
        logits = torch.empty(SIZES[-1], model.config.vocab_size, device=device)
        self._make_step = partial(
            DecodeStep, model, cache, num_columns=num_columns, gpu=gpu, logits=logits
        )
        self._device = device.index or 0
        self._record = record
        self._recorded: dict[int, _Recorded] = {}

    def prepare(self) -> None:
        """Capture a CUDA graph for each batch size, which takes seconds; log the progress."""
        # Start with the largest: the others fit into the memory pool that its capture allocates.
        for number, size in enumerate(reversed(SIZES), 1):
            self._captured(size)
            if number % _PROGRESS == 0 or number == len(SIZES):
                log.info("recorded decode steps", done=number, of=len(SIZES))

    @staticmethod
    def can_replay(rows: torch.Tensor, batch: PagedBatch) -> bool:
        """Return whether a graph can run this step: one token per sequence, with logits for all."""
        num_sequences = len(batch.context_lens)
        is_decode = len(batch.slots) == len(rows) == num_sequences <= SIZES[-1]
        # A step with prompt logprobs has rows out of order: they follow the sampled ones.
        return bool(is_decode and (rows[1:] > rows[:-1]).all())

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        drawn: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute one step for which `can_replay` is true.

        Args:
            token_ids, positions: [T] int32 in CPU memory.
            drawn: int32 tokens on the device that replace negative `token_ids`; see `fill_in`.

        Returns:
            [T, vocab] float32 logits, valid until the next step.
        """
        count = len(token_ids)
        size = next(size for size in SIZES if size >= count)
        it = self._captured(size)
        it.step.set(token_ids, positions, batch, drawn)
        cuda.note_started(self._device, f"a graph of {size} sequences")
        it.replay()
        return it.step.logits[:count]

    def _captured(self, size: int) -> _Recorded:
        if size not in self._recorded:
            step = self._make_step(size)
            self._recorded[size] = _Recorded(step, self._record(step))
        return self._recorded[size]


def fill_in(token_ids: torch.Tensor, drawn: torch.Tensor) -> None:
    """Replace each negative id -1 - r by drawn[r], a token that was sampled on the device."""
    rows = (~token_ids).clamp_(min=0)
    torch.where(token_ids < 0, drawn[rows], token_ids, out=token_ids)


def graphs_of(model: Model, cache: TorchKVCache, max_model_len: int) -> DecodeGraphs | None:
    """Return the CUDA graphs for a model; None if its steps cannot be captured."""
    if not isinstance(model, Transformer):
        return None
    if any(layer.experts or layer.delta for layer in model.config.layers):
        return None  # experts make the host read row counts; states change slots in each step
    return DecodeGraphs(
        model,
        cache,
        max_model_len=max_model_len,
        gpu=cuda.gpu(cache.pool.device.index or 0),
        record=partial(record_graph, memory_pool=torch.cuda.graph_pool_handle()),
    )


def record_graph(step: DecodeStep, memory_pool: Any) -> Callable[[], None]:
    """Capture a step as a CUDA graph in the memory pool `memory_pool`; implements `Record`."""
    # The first run compiles, loads and allocates, which must not happen during capture.
    warmup: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        step()
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    # Other threads continue to copy KV meanwhile, and may allocate memory.
    with torch.cuda.graph(graph, pool=memory_pool, capture_error_mode="thread_local"):
        step()
    return graph.replay
