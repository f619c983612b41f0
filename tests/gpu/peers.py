"""Torch's attention (on dense KV) and FlashInfer's (on paged KV) do the same tasks."""

from __future__ import annotations

import importlib.util
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.gpu.bench import (
    BF16,
    BLOCK_SIZE,
    decode_heads,
    decode_lens,
    flops,
    pages,
    prompt_heads,
    prompt_length,
    table_of,
)
from tests.gpu.settings import Part, Settings
from tests.gpu.timing import device_s
from tests.gpu.trail import Figures
from tests.kernels.scenes import Scene

SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def peer_parts(settings: Settings) -> dict[str, Part]:
    """Measure prompts of 8k and 16k by each peer, and decode by FlashInfer if it is installed."""
    parts: dict[str, Part] = {
        f"{peer} {kilo}k": partial(_sdpa, settings, peer, kilo) for kilo in (8, 16) for peer in SDPA
    }
    if settings.backend == "cuda" and importlib.util.find_spec("flashinfer") is not None:
        prefill = partial(_flashinfer_prefill, settings)
        parts |= {f"flashinfer {kilo}k": partial(prefill, kilo) for kilo in (8, 16)}
        parts["flashinfer decode"] = partial(_flashinfer_decode, settings)
    return parts


def _sdpa(settings: Settings, peer: str, kilo: int) -> Figures:
    num_heads, num_kv_heads, head_dim = prompt_heads(settings)
    length, device = prompt_length(settings, kilo), settings.device
    query = torch.randn(1, num_heads, length, head_dim, dtype=BF16, device=device)
    key = torch.randn(1, num_kv_heads, length, head_dim, dtype=BF16, device=device)
    value = torch.randn_like(key)

    def attend() -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    with sdpa_kernel(SDPA[peer] if settings.backend == "cuda" else SDPBackend.MATH):
        seconds = device_s(attend, repeats=7)
    return {f"{peer}_{kilo}k_tflops": flops(settings, length) / seconds / 1e12}


def _flashinfer_prefill(settings: Settings, kilo: int) -> Figures:
    heads, length = prompt_heads(settings), prompt_length(settings, kilo)
    it = pages(settings, [(length, length)], heads)
    wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(_workspace(), "HND")
    starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    shape = (*heads, BLOCK_SIZE)
    wrapper.plan(starts, *_page_table(it), *shape, causal=True, q_data_type=BF16)
    seconds = device_s(lambda: wrapper.run(it.query, it.pool[:, 0]), repeats=7)
    return {f"flashinfer_{kilo}k_tflops": flops(settings, length) / seconds / 1e12}


def _flashinfer_decode(settings: Settings) -> Figures:
    figures: Figures = {}
    heads = decode_heads(settings)
    for name, lens in decode_lens(settings).items():
        it = pages(settings, lens, heads)
        module = import_module("flashinfer")
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(), "HND", use_tensor_cores=True
        )
        wrapper.plan(*_page_table(it), *heads, BLOCK_SIZE, q_data_type=BF16, data_type=BF16)
        seconds = device_s(partial(wrapper.run, it.query, it.pool[:, 0]))
        figures[f"flashinfer_decode_{name}_gbs"] = it.pool.nbytes / seconds / 1e9
    return figures


def _workspace() -> torch.Tensor:
    return torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")


def _page_table(it: Scene) -> tuple[Any, ...]:
    """Return where each table starts, the tables' blocks, and the tokens in each last block."""
    contexts = it.batch.context_lens.tolist()
    tables = [table_of(it, sequence) for sequence in range(len(contexts))]
    starts = [0, *accumulate(map(len, tables))]
    blocks = [block for table in tables for block in table]
    last = [(context - 1) % BLOCK_SIZE + 1 for context in contexts]
    return tuple(
        torch.tensor(numbers, dtype=torch.int32, device="cuda")
        for numbers in (starts, blocks, last)
    )
