"""Every instantiation of the CUDA kernels that `kernels.cuda.launch` can ask for, by its sizes."""

from __future__ import annotations

from itertools import product

import torch

from kernels.cuda import tiling
from kernels.cuda.launch import DTYPE_NAMES, POOL_DTYPES, WIDE_BYTES, is_tiled
from tests.kernels.shim.backend import GPU, LARGE_GPU

# Shared memory of a multiprocessor by architecture.
SHARED_BYTES = {"sm_80": 164 << 10, "sm_89": 100 << 10, "sm_90": 228 << 10}


def attention_kernels(dtype: torch.dtype, head_dim: int, *gpus: tiling.Gpu) -> list[str]:
    """Return those of attention of this dtype and head size, on the shim's GPUs by default."""
    name = DTYPE_NAMES[dtype]
    if not is_tiled(dtype, head_dim):
        return [f"attend_plain<{name}>"]
    tiles = [tiling.many_rows_tile(head_dim, gpu) for gpu in gpus or (GPU, LARGE_GPU)]
    tiles.append(tiling.few_rows_tile(head_dim))
    names = [tile.kernel(name, head_dim) for tile in dict.fromkeys(tiles)]
    return [kernel for source, kernel in names if source == "attention"]


def wide_kernels(dtype: torch.dtype, head_dim: int) -> list[str]:
    """Return those of attention with many rows on Hopper."""
    return [tiling.WideTile().kernel(DTYPE_NAMES[dtype], head_dim)[1]]


def kv_kernels(pool: torch.dtype, wire: torch.dtype) -> list[str]:
    """Return those that keep a pool of one dtype and a wire of another."""
    held, sent = DTYPE_NAMES[pool], DTYPE_NAMES[wire]
    widths = dict.fromkeys((WIDE_BYTES // pool.itemsize, 4))
    found = [f"rotate_and_append<{held},{width}>" for width in widths]
    return [*found, f"move<{held},{sent},false>", f"move<{held},{sent},true>"]


def all_moves() -> dict[str, list[str]]:
    """Return every instantiation of kv.cu."""
    pairs = product(POOL_DTYPES, DTYPE_NAMES)
    return {"kv": list(dict.fromkeys(name for pair in pairs for name in kv_kernels(*pair)))}


def rowwise_kernels(dtype: torch.dtype) -> list[str]:
    """Return those of rows of this dtype."""
    widths = (WIDE_BYTES // dtype.itemsize, 1)
    names = ("rms_norm", "gate")
    return [f"{name}<{DTYPE_NAMES[dtype]},{width}>" for name in names for width in widths]


SAMPLING_KERNELS = ["draw"]
