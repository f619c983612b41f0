"""Decode steps repeated as CUDA graphs against the same steps started kernel by kernel."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch

from kernels import PagedBatch
from scripts.models.make_model import make_model
from tests.gpu.inputs import TOLERANCE
from tests.gpu.settings import Part, Settings
from tests.gpu.trail import Figures
from tests.gpu.verify import Wrong
from worker.compute.graphs import graphs_of
from worker.compute.model import load_model
from worker.executor.torch import layout_of, make_cache

BLOCK_SIZE, MAX_LEN = 16, 1024
DTYPES = ("bfloat16", "float16", "float32")


def graph_parts(settings: Settings) -> dict[str, Part]:
    """A model of each dtype; see `_replays`."""
    return {f"graphs {dtype}": partial(_replays, settings, dtype) for dtype in DTYPES}


def _replays(settings: Settings, dtype: str) -> Figures:
    """Steps of other sizes and lengths, each twice: the first records, the second repeats."""
    draw = settings.random(f"graphs {dtype}")
    kind = getattr(torch, dtype)
    with tempfile.TemporaryDirectory() as scratch:
        path = make_model(Path(scratch), max_position_embeddings=MAX_LEN, head_dim=64)
        model = load_model(path, kind, settings.device)
    config = model.config
    num_blocks = 40 * MAX_LEN // BLOCK_SIZE
    generator = torch.Generator(settings.device).manual_seed(draw.getrandbits(60))
    cache = make_cache(model, layout_of(config, kind), num_blocks, BLOCK_SIZE)
    pool = cache.pool
    pool.copy_(torch.randn(pool.shape, device=settings.device, generator=generator))
    recorded = graphs_of(model, cache, MAX_LEN)
    assert recorded is not None
    worst, num_cases = 0.0, 0
    for count in (1, 2, 3, 7, 20, 33, 3, 20):
        lens = torch.tensor([draw.randint(1, MAX_LEN) for _ in range(count)], dtype=torch.int32)
        order = torch.tensor(draw.sample(range(num_blocks), num_blocks), dtype=torch.int32)
        tables = order.view(40, -1)[:count].contiguous()
        last = lens - 1
        slots = tables[torch.arange(count), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
        starts = torch.arange(count + 1, dtype=torch.int32)
        token_ids = torch.tensor([draw.randrange(100) for _ in range(count)], dtype=torch.int32)
        for _ in range(2):
            batch = PagedBatch(slots, starts, lens, tables)
            got = recorded.forward(token_ids, last, batch).clone()
            want = model.forward(
                token_ids.to(pool.device),
                last.to(pool.device),
                pool,
                PagedBatch(slots, starts, lens, tables),
                torch.arange(count, device=pool.device),
            )
            # The two may split keys differently, and round in another order: of all layers.
            share = float(((got - want).abs().max() / (5 * TOLERANCE[kind])).item())
            if not share <= 1:
                raise Wrong(f"{count} sequences, {lens.tolist()}: {share:.3g} of what is tolerated")
            worst, num_cases = max(worst, share), num_cases + 1
    return {"cases": num_cases, "worst share of the tolerance": round(worst, 3)}
