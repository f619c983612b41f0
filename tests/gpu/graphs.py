"""Decode steps repeated as CUDA graphs against the same steps started kernel by kernel."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

import kernels
from kernels import PagedBatch
from scripts.models.make_model import make_model
from tests.gpu.in_flight import text_parts
from tests.gpu.settings import Part, Settings
from tests.gpu.trail import Figures
from tests.gpu.verify import Wrong
from tests.kernels.instances import attention_kernels, kv_kernels, rowwise_kernels
from tests.kernels.scenes import TOLERANCE
from tests.kernels.shim.backend import GPU, Shim
from tests.kernels.shim.recording import CopiedUploads, Recorder
from worker.compute.graphs import DecodeGraphs, graphs_of
from worker.compute.kv_cache import TorchKVCache
from worker.compute.model import Model, load_model
from worker.compute.transformer import Transformer
from worker.executor.torch import layout_of, make_cache

BLOCK_SIZE = 16
DTYPES = ("bfloat16", "float16", "float32")


def graph_parts(settings: Settings) -> dict[str, Part]:
    """A model of each dtype, see `_replays`; and graphs one behind the other."""
    parts: dict[str, Part] = {f"graphs {it}": partial(_replays, settings, it) for it in DTYPES}
    return parts | text_parts(settings)


def _replays(settings: Settings, dtype: str) -> Figures:
    """Steps of other sizes and lengths, each twice: the first records, the second repeats."""
    draw = settings.random(f"graphs {dtype}")
    kind = getattr(torch, dtype)
    max_len, num_tables = settings.size((1024, 40), (128, 4))
    with tempfile.TemporaryDirectory() as scratch:
        path = make_model(Path(scratch), max_position_embeddings=max_len, head_dim=64)
        model = load_model(path, kind, settings.device)
    cache = cache_of(settings, model, num_tables * max_len // BLOCK_SIZE)
    generator = torch.Generator(settings.device).manual_seed(draw.getrandbits(60))
    cache.pool.copy_(torch.randn(cache.pool.shape, device=settings.device, generator=generator))
    worst, num_cases = 0.0, 0
    with shim_for(settings, model) as shim:
        recorded = _record(shim, model, cache, max_len)
        for count in settings.size((1, 2, 3, 7, 20, 33, 3, 20), (1, 3, 1)):
            lens = [draw.randint(1, max_len) for _ in range(count)]
            blocks = draw.sample(range(cache.num_blocks), cache.num_blocks)
            tables = torch.tensor(blocks, dtype=torch.int32).view(num_tables, -1)[:count]
            token_ids = torch.tensor([draw.randrange(100) for _ in range(count)], dtype=torch.int32)
            for _ in range(2):
                difference = _difference(model, cache, recorded, token_ids, lens, tables)
                # The two may split keys differently, and round in another order: of all layers.
                share = difference / (5 * TOLERANCE[kind])
                if not share <= 1:
                    raise Wrong(f"{count} sequences, {lens}: {share:.3g} of what is tolerated")
                worst, num_cases = max(worst, share), num_cases + 1
    return {"cases": num_cases, "worst share of the tolerance": round(worst, 3)}


def cache_of(settings: Settings, model: Model, num_blocks: int) -> TorchKVCache:
    """Return a cache with a spare block, as on a GPU."""
    layout = layout_of(model.config, model.kv_dtype)
    if settings.backend == "cuda":
        return make_cache(model, layout, num_blocks, BLOCK_SIZE)
    return TorchKVCache(layout, num_blocks, BLOCK_SIZE, settings.device, spare_blocks=1)


@contextmanager
def shim_for(settings: Settings, model: Model) -> Iterator[Shim | None]:
    """Have the model's kernels be the shim's meanwhile; on a GPU they are what they are."""
    if settings.backend == "cuda":
        yield None
        return
    dtype = model.kv_dtype
    needed = {"kv": kv_kernels(dtype, dtype), "rowwise": rowwise_kernels(dtype)}
    shim = Shim({"attention": attention_kernels(dtype, model.config.head_dim)} | needed)
    with patch.object(kernels, "backend_of", lambda _: shim), CopiedUploads():
        yield shim


def _record(shim: Shim | None, model: Model, cache: TorchKVCache, max_len: int) -> DecodeGraphs:
    if shim is None:
        graphs = graphs_of(model, cache, max_len)
        assert graphs is not None
        return graphs
    assert isinstance(model, Transformer)
    return DecodeGraphs(model, cache, max_model_len=max_len, gpu=GPU, record=Recorder(shim))


def _difference(
    model: Model,
    cache: TorchKVCache,
    recorded: DecodeGraphs,
    token_ids: torch.Tensor,
    lens: list[int],
    tables: torch.Tensor,
) -> float:
    """Return the largest difference of logits between a replayed step and a plain one."""
    count, device = len(lens), cache.pool.device
    contexts = torch.tensor(lens, dtype=torch.int32)
    last = contexts - 1
    slots = tables[torch.arange(count), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
    starts = torch.arange(count + 1, dtype=torch.int32)
    got = recorded.forward(token_ids, last, PagedBatch(slots, starts, contexts, tables)).clone()
    want = model.forward(
        token_ids.to(device),
        last.to(device),
        cache.pool,
        PagedBatch(slots, starts, contexts, tables),
        torch.arange(count, device=device),
    )
    return float((got - want).abs().max().item())
