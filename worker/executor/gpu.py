"""The torch executor on a GPU: replays CUDA graphs for decode steps and runs ahead of the device.

The input of a step is uploaded in one asynchronous copy.  The sampled tokens stay on the GPU for
the next step, and are copied to the host at the same time.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from kernels.cuda import backend as cuda
from kernels.cuda.pinned import Download, upload
from worker.compute.contract import KVCache
from worker.compute.device import find_device
from worker.compute.graphs import DecodeGraphs, fill_in, graphs_of
from worker.compute.model import Model
from worker.executor import sampler
from worker.executor.batch import Batch, Sampling
from worker.executor.contract import Drawn, ModelInfo, SampledToken
from worker.executor.masks import is_limited
from worker.executor.torch import Step, TorchExecutor, with_pools

log = structlog.get_logger("worker")


def create(
    *, model_path: str | Path, model_name: str, device: str = "auto", **settings: Any
) -> TorchExecutor:
    """Load a model directory on the given kind of device; see `TorchExecutor.load`."""
    torch_device = find_device(device)
    kind = GpuExecutor if torch_device.type == "cuda" else TorchExecutor
    return kind.load(Path(model_path), name=model_name, device=str(torch_device), **settings)


class GpuExecutor(TorchExecutor):
    """A transformer on a GPU; also implements `worker.executor.contract.Drawer`."""

    def __init__(self, model: Model, info: ModelInfo, path: Path) -> None:
        super().__init__(model, info, path)
        self._graphs: DecodeGraphs | None = None
        self._drawn: torch.Tensor | None = None  # [R] int32 tokens of the last `draw`

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> KVCache:
        """See `TorchExecutor.allocate`."""
        cache = super().allocate(num_blocks, block_size, num_states, num_window_blocks)
        assert self._model is not None and self._cache is not None
        self._graphs = graphs_of(self._model, self._cache, self.info.max_model_len)
        return cache

    def prepare(self) -> int:
        """Capture CUDA graphs and benchmark prompt attention; see `Preparer.prepare`."""
        assert self._model is not None and self._cache is not None
        if self._graphs is not None:
            self._graphs.prepare()
        table = cuda.measure_prompts(self._cache.pool, self._model.config.num_heads)
        log.info("prompts are attended to", ways={n: way.value for n, way in table})
        return super().prepare()

    def _compute(self, step: Step) -> torch.Tensor:
        """Start to compute the logits of a step's rows."""
        assert self._model is not None and self._cache is not None
        batch, drawn = with_pools(self._cache, step), None
        # Negative ids stand for tokens of the last `draw` that are only on the device (`Drawer`).
        if bool((step.token_ids < 0).any()):
            drawn = self._drawn
            assert drawn is not None, "the step reads a token before any draw"
        if self._graphs is not None and self._graphs.can_replay(step.rows, batch):
            return self._graphs.forward(step.token_ids, step.positions, batch, drawn)
        tables = [it.numpy() for it in (step.token_ids, step.positions, step.rows)]
        token_ids, positions, rows = upload(tables, self._model.device)
        if drawn is not None:
            fill_in(token_ids, drawn)
        return self._model.forward(token_ids, positions, self._cache.pool, batch, rows)

    def can_draw(self, batch: Batch) -> bool:
        """See `worker.executor.contract.Drawer`."""
        samplings = batch.samplings
        return bool(samplings) and not batch.scorings and all(map(_is_plain, samplings))

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, batch: Batch) -> Drawn:
        """See `worker.executor.contract.Drawer`."""
        try:
            self._drawn = sampler.draw(logits[: len(batch.sample_rows)], batch.samplings).int()
            return partial(self._read, Download(self._drawn))
        except RuntimeError as error:
            self._note_started(error)
            raise

    def _read(self, token_ids: Download) -> list[SampledToken]:
        """Wait for the end of a step and return its tokens."""
        try:
            return [SampledToken(token_id) for token_id in token_ids.read()]
        except RuntimeError as error:
            self._note_started(error)
            raise

    def shutdown(self) -> None:
        """Free the weights, the KV cache, and the CUDA graphs that use them."""
        super().shutdown()
        self._graphs = self._drawn = None


def _is_plain(sampling: Sampling) -> bool:
    """Return whether the device can sample this sequence's next token without the host."""
    options = sampling.options
    needs_host = options.has_penalties or options.logit_bias or options.logprobs is not None
    is_constrained = sampling.structured is not None or is_limited(sampling)
    return not (needs_host or is_constrained or sampling.drafts)
