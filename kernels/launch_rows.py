"""The launches of csrc/rowwise.cu, as `kernels.launch` has those of attention and KV."""

from __future__ import annotations

import numpy as np
import torch

from kernels.contract import KernelError
from kernels.launch import DTYPE_NAMES, POOL_DTYPES, Launch, point, struct

NORMALIZE = struct("x added weight out", "size", "eps")
GATE = struct("gate_up out", "size")
_THREADS = 128
_SUM_BYTES = _THREADS // 32 * 4


def row_kernels(dtype: torch.dtype) -> list[str]:
    """Return the instantiations for one dtype."""
    return [f"normalize<{DTYPE_NAMES[dtype]}>", f"gate<{DTYPE_NAMES[dtype]}>"]


def normalize(
    x: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> list[Launch]:
    """Make out the rows of x, normalized; x += added before if there is something to add.

    Args:
        x: [R, K], contiguous; `added` and `out` likewise, of one dtype, as weight [K].
    """
    normalize_kernel, _ = row_kernels(_dtype_of(x))
    arguments = np.zeros(1, NORMALIZE)
    arguments["size"], arguments["eps"] = x.shape[1], eps
    point(arguments, x=x, weight=weight, out=out)
    keep = [x, weight, out]
    if added is not None:
        point(arguments, added=added)
        keep.append(added)
    if not all(tensor.dtype == x.dtype and tensor.is_contiguous() for tensor in keep):
        raise KernelError(f"rows, weight and what is added are not all contiguous {x.dtype}")
    grid = (x.shape[0], 1)
    launch = Launch("rowwise", normalize_kernel, grid, _THREADS, _SUM_BYTES, arguments, tuple(keep))
    return [launch] if x.shape[0] else []


def gate(gate_up: torch.Tensor, out: torch.Tensor) -> list[Launch]:
    """Make out [R, K] = silu(gate) * up of gate_up [R, 2 K], contiguous and of one dtype."""
    _, gate_kernel = row_kernels(_dtype_of(gate_up))
    arguments = np.zeros(1, GATE)
    rows, size = out.shape
    arguments["size"] = size
    point(arguments, gate_up=gate_up, out=out)
    grid = (-(-size // _THREADS), rows)
    launch = Launch("rowwise", gate_kernel, grid, _THREADS, 0, arguments, (gate_up, out))
    return [launch] if rows else []


def _dtype_of(rows: torch.Tensor) -> torch.dtype:
    if rows.dtype not in POOL_DTYPES:
        raise KernelError(f"rows are {rows.dtype}, not float32, bfloat16 or float16")
    return rows.dtype
