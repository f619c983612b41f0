"""How rowwise.cu is launched: the widths of its loads, its threads and its grids.

Rows are [..., K], contiguous; dtypes are those of a pool.  As in `kernels.launch`, pointers are
integers and nothing here asks the device.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.contract import KernelError
from kernels.launch import DTYPE_NAMES, POOL_DTYPES, Launch, point, struct

# The structs of rowwise.cu, field by field.
NORM = struct("x y weight out", "size", "eps")
GATE = struct("gate_up out", "rows size")
# The launch bounds of rowwise.cu.
MAX_NORM_THREADS = 512
MAX_GATE_THREADS = 256
_WIDE_BYTES = 16
_WARP = 32


def rowwise_kernels(dtype: torch.dtype) -> list[str]:
    """Return every instantiation that rows of this dtype can ask for."""
    widths = (_WIDE_BYTES // dtype.itemsize, 1)
    names = ("rms_norm", "silu_gate")
    return [f"{name}<{DTYPE_NAMES[dtype]},{width}>" for name in names for width in widths]


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    y: torch.Tensor | None = None,
) -> list[Launch]:
    """Make out = x / sqrt(mean(x^2) + eps) * weight; with `y`, x += y in place before that.

    Args:
        x: [..., K]; `y` and `out` likewise, `weight` [K], all of one dtype.

    Raises:
        KernelError: A tensor is not of that shape and dtype, or is not contiguous.
    """
    tensors = {"x": x, "weight": weight, "out": out} | ({} if y is None else {"y": y})
    size = x.shape[-1]
    _check(x.dtype, tensors, dict.fromkeys(tensors, x.shape) | {"weight": x.shape[-1:]})
    if not x.numel():
        return []
    width = _width(size, *tensors.values())
    arguments = np.zeros(1, NORM)
    arguments["size"], arguments["eps"] = size, eps
    point(arguments, **tensors)
    threads = _threads(size // width, MAX_NORM_THREADS)
    kernel, grid = f"rms_norm<{DTYPE_NAMES[x.dtype]},{width}>", (x.numel() // size, 1)
    shared = threads // _WARP * np.dtype(np.float32).itemsize
    return [Launch("rowwise", kernel, grid, threads, shared, arguments, tuple(tensors.values()))]


def gate(gate_up: torch.Tensor, out: torch.Tensor, *, wanted_blocks: int) -> list[Launch]:
    """Make out = silu(gate) * up.

    Args:
        gate_up: [..., 2 K]: gate first, then up; `out` [..., K] of the same dtype.
        wanted_blocks: How many thread blocks fill the device; more rows are taken in turns.

    Raises:
        KernelError: A tensor is not of that shape and dtype, or is not contiguous.
    """
    shape = torch.Size((*out.shape[:-1], 2 * out.shape[-1]))
    _check(out.dtype, {"out": out, "gate_up": gate_up}, {"out": out.shape, "gate_up": shape})
    if not out.numel():
        return []
    size = out.shape[-1]
    rows, width = out.numel() // size, _width(size, gate_up, out)
    arguments = np.zeros(1, GATE)
    arguments["rows"], arguments["size"] = rows, size
    point(arguments, gate_up=gate_up, out=out)
    threads = _threads(size // width, MAX_GATE_THREADS)
    across = -(-(size // width) // threads)
    grid = (across, min(rows, -(-wanted_blocks // across)))
    kernel = f"silu_gate<{DTYPE_NAMES[out.dtype]},{width}>"
    return [Launch("rowwise", kernel, grid, threads, 0, arguments, (gate_up, out))]


def _width(size: int, *tensors: torch.Tensor) -> int:
    """Return how many values every row of every tensor lets a thread load at once."""
    width = _WIDE_BYTES // tensors[0].itemsize
    aligned = all(tensor.data_ptr() % _WIDE_BYTES == 0 for tensor in tensors)
    return width if aligned and size % width == 0 else 1


def _threads(units: int, most: int) -> int:
    return min(most, -(-units // _WARP) * _WARP)


def _check(
    dtype: torch.dtype, tensors: dict[str, torch.Tensor], shapes: dict[str, torch.Size]
) -> None:
    if dtype not in POOL_DTYPES:
        raise KernelError(f"the rows are {dtype}, not float32, bfloat16 or float16")
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.shape != shapes[name]:
            raise KernelError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shapes[name])}"
            )
        if not tensor.is_contiguous():
            raise KernelError(f"{name} is not contiguous: give it as one run of rows")
