"""A CPU that `worker.executor.gpu` takes for a GPU: the kernels run through the shim, at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import kernels
from kernels.cuda import backend as cuda
from tests.kernels.instances import (
    SAMPLING_KERNELS,
    attention_kernels,
    kv_kernels,
    rowwise_kernels,
)
from tests.kernels.shim.backend import GPU, Shim
from tests.kernels.shim.recording import CopiedUploads, Recorder
from wire.layout import KVLayout
from worker.compute.graphs import DecodeGraphs
from worker.compute.kv_cache import TorchKVCache
from worker.compute.model import Model, load_model
from worker.compute.transformer import Transformer
from worker.executor import gpu
from worker.executor import torch as torch_executor
from worker.executor.gpu import GpuExecutor
from worker.executor.torch import TorchExecutor

CPU = torch.device("cpu")


class Event:
    """A CPU has done what it was asked for."""

    def record(self, stream: object) -> None:
        """Note nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""


def executor_of(path: Path, dtype: torch.dtype = torch.float32) -> GpuExecutor:
    """Load a model for `gpu_on_cpu`."""
    info = TorchExecutor.load(path, name="tiny", device="cpu", dtype=str(dtype)[6:]).info
    return GpuExecutor(load_model(path, dtype, CPU), info, path)


@contextmanager
def gpu_on_cpu(dtype: torch.dtype = torch.float32, head_dim: int = 16) -> Iterator[None]:
    """Have what executors of such models do on a GPU be done here."""
    needed = {"kv": kv_kernels(dtype, dtype), "rowwise": rowwise_kernels(dtype)}
    needed["sampling"] = SAMPLING_KERNELS
    shim = Shim({"attention": attention_kernels(dtype, head_dim)} | needed)

    def graphs_of(model: Transformer, cache: TorchKVCache, max_model_len: int) -> DecodeGraphs:
        sizes: dict[str, Any] = {"max_model_len": max_model_len, "gpu": GPU}
        return DecodeGraphs(model, cache, **sizes, record=Recorder(shim))

    def make_cache(_: Model, layout: KVLayout, blocks: int, size: int, *__: int) -> TorchKVCache:
        return TorchKVCache(layout, blocks, size, CPU, spare_blocks=1)

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (kernels, "backend_of", lambda _: shim),
            (gpu, "graphs_of", graphs_of),
            (cuda, "measure_prompts", lambda *_: ()),
            (torch_executor, "make_cache", make_cache),
            (torch.cuda, "Event", Event),
            (torch.cuda, "current_stream", lambda _: None),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(CopiedUploads())
        yield
