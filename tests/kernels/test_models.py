"""Whole models through the shim: the logits of the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from kernels import reference
from kernels.contract import Backend
from scripts.models.make_model import make_model
from tests.kernels.instances import (
    SAMPLING_KERNELS,
    attention_kernels,
    kv_kernels,
    rowwise_kernels,
)
from tests.kernels.shim.backend import Shim, why_not
from tests.kv import whole
from tests.worker.paged import Text, advance
from worker.compute.compiled import CompiledTransformer
from worker.executor.torch import TorchExecutor
from worker.model.weights import Weights

BLOCK_SIZE = 16
# The plain kernel, and the tiles.
CASES: dict[str, dict[str, Any]] = {
    "llama-float32": {"num_key_value_heads": 2},
    "qwen3_next-float32": {"num_key_value_heads": 2},
    "mistral-float16": {"head_dim": 64, "sliding_window": 12},
    "gemma3_text-bfloat16": {"head_dim": 64},
    "gpt_oss-bfloat16": {"head_dim": 64},
}
# A wrong key or mask changes logits by about 1; rounding to 16 bits in two orders, by less.
LIMITS = {"float32": 1e-4, "bfloat16": 8e-2, "float16": 1e-2}


@pytest.fixture
def served_by(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have a backend serve the CPU, and torch compute the rest as on a GPU."""
    monkeypatch.setattr(CompiledTransformer, "fits", lambda *_, **__: False)
    monkeypatch.setattr(Weights, "widen", lambda self: None)

    def serve(backend: Backend) -> None:
        monkeypatch.setattr(kernels, "backend_of", lambda _: backend)

    return serve


def run(path: Path, dtype: str) -> tuple[torch.Tensor, bytes]:
    """Read two prompts in chunks, move one to other blocks, generate; return logits and KV."""
    executor = TorchExecutor.load(path, name="tiny", device="cpu", dtype=dtype)
    cache = executor.allocate(24, BLOCK_SIZE, *([16] if executor.info.layout.has_state else []))
    generator = torch.Generator().manual_seed(1)
    first, second = (
        Text(torch.randint(0, 100, (size,), generator=generator).tolist(), blocks)
        for size, blocks in ((41, [7, 2, 19, 4, 11]), (18, [3, 0, 9]))
    )
    logits = [
        advance(executor, [(first, 17)], BLOCK_SIZE),
        advance(executor, [(first, 24), (second, 18)], BLOCK_SIZE),
    ]
    layout, count = executor.info.layout, first.computed
    everything = [whole(layout, 0, count)]
    everything += [whole(layout, count, 0, group=1)] if layout.has_state else []
    segments = [bytes(cache.pack(first.blocks, part)) for part in everything]
    first.blocks = [1, 5, 6, 8, 10]
    for part, segment in zip(everything, segments, strict=True):
        cache.unpack(first.blocks, part, segment)
    for token in range(6):
        # Not those that were drawn: in 16 bits two may be as likely, and the texts would part.
        first.token_ids[-1], second.token_ids[-1] = 90 + token, 80 - token
        logits.append(advance(executor, [(first, 1), (second, 1)], BLOCK_SIZE))
    return torch.cat(logits), segments[0]


@pytest.mark.parametrize("name", list(CASES))
def test_logits_are_those_of_the_reference(name: str, served_by: Any, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    family, dtype = name.split("-")
    path = make_model(tmp_path, family=family, **CASES[name])
    served_by(reference)
    want, sent = run(path, dtype)
    kind, head_dim = getattr(torch, dtype), CASES[name].get("head_dim", 16)
    needed = {
        "attention": attention_kernels(kind, head_dim),
        "kv": kv_kernels(kind, kind),
        "rowwise": rowwise_kernels(kind),
        "sampling": SAMPLING_KERNELS,
    }
    served_by(Shim(needed))
    got, segment = run(path, dtype)
    limit = LIMITS[dtype]
    torch.testing.assert_close(got, want, rtol=limit, atol=limit)
    values, wanted = (torch.frombuffer(bytearray(kv), dtype=kind) for kv in (segment, sent))
    torch.testing.assert_close(values, wanted, rtol=limit, atol=limit)


def test_blocks_that_no_kernel_serves_are_refused(served_by: Any, tmp_path: Path) -> None:
    served_by(Shim({}))  # no kernel is needed to refuse
    executor = TorchExecutor.load(make_model(tmp_path), name="tiny", device="cpu")
    with pytest.raises(ValueError, match=r"block_size is 12, not a power of two .*--block-size"):
        executor.allocate(4, 12)
