"""Torch's attention on the same prompts, which reads dense KV."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.gpu.bench import BF16, flops, prompt_heads, prompt_length
from tests.gpu.settings import Part, Settings
from tests.gpu.timing import device_s
from tests.gpu.trail import Figures

SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def peer_parts(settings: Settings) -> dict[str, Part]:
    """Prompts of 8k and 16k by each peer."""
    return {
        f"{peer} {kilo}k": partial(_sdpa, settings, peer, kilo) for kilo in (8, 16) for peer in SDPA
    }


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
