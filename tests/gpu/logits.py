"""Our bfloat16 logits differ no more from float32 logits than transformers' bfloat16 logits do."""

from __future__ import annotations

import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kernels import PagedBatch
from scripts.models.make_model import make_model
from tests.gpu.graphs import BLOCK_SIZE, cache_of, shim_for
from tests.gpu.settings import Part, Settings, Unavailable
from tests.gpu.trail import Figures
from tests.gpu.verify import Wrong
from worker.compute.model import load_model

# llama has neither biases nor norms of queries and keys, qwen2 has biases, qwen3 has norms.
FAMILIES = ("llama", "qwen2", "qwen3")


def logit_parts(settings: Settings) -> dict[str, Part]:
    """Check a random model of each family; see `_logits`."""
    return {f"logits {family}": partial(_logits, settings, family) for family in FAMILIES}


def _logits(settings: Settings, family: str) -> Figures:
    """Compare the logits of all tokens of a prompt; the weights are bfloat16 in every model."""
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise Unavailable(
            f"{error}: it is a development dependency, which --wheels does not carry"
        ) from error
    draw = settings.random(f"logits {family}")
    token_ids = [draw.randrange(100) for _ in range(settings.size(1000, 120))]
    with tempfile.TemporaryDirectory() as scratch:
        sizes: dict[str, Any] = settings.size({"hidden_size": 512, "num_hidden_layers": 8}, {})
        path = make_model(
            Path(scratch), family=family, head_dim=64, dtype="bfloat16", seed=settings.seed, **sizes
        )
        exact, theirs = (
            _theirs(transformers, path, dtype, settings.device, token_ids)
            for dtype in (torch.float32, torch.bfloat16)
        )
        ours = _ours(settings, path, token_ids)
    size = exact.std()
    off, limit = (float((it - exact).square().mean().sqrt() / size) for it in (ours, theirs))
    if not off <= limit:
        raise Wrong(f"{off:.3g} of a standard deviation from float32, transformers {limit:.3g}")
    return {f"logits_{family}_off": off, f"logits_{family}_off_transformers": limit}


def _theirs(
    transformers: Any, path: Path, dtype: torch.dtype, device: torch.device, token_ids: list[int]
) -> torch.Tensor:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(path, attn_implementation="eager", dtype=dtype).to(device)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids], device=device)).logits[0].float()
    return logits


def _ours(settings: Settings, path: Path, token_ids: list[int]) -> torch.Tensor:
    model, count = load_model(path, torch.bfloat16, settings.device), len(token_ids)
    num_blocks = -(-count // BLOCK_SIZE)
    cache = cache_of(settings, model, num_blocks)
    numbers = torch.arange(count, dtype=torch.int32)
    batch = PagedBatch(
        slots=numbers,
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
    )
    ids, positions, rows = (
        it.to(settings.device) for it in (torch.tensor(token_ids), numbers, numbers.long())
    )
    with shim_for(settings, model):
        return model.forward(ids, positions, cache.pool, batch, rows)
