"""A model of bfloat16 products, and a look at the processor's tiles after them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from kernels.cpu import amx
from kernels.cpu.bfloat16_methods import Way, known_ways
from kernels.cpu.intrinsics import instruction

Floats = npt.NDArray[np.float32]
# What a processor does not know is left out.
WAYS = known_ways()


def sums_of(way: Way, x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return start + x W^T of bfloat16 x [T, K] and W [N, K], K of whole steps, summed this way."""
    return (dot_sums if way is Way.DOTS else tile_sums)(x, weight, start)


def tile_sums(x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return `sums_of` tiles.

    A product of two bfloat16 is exact in float32, so that each sum is rounded once as in the
    processor.
    """
    left, right = x.float().numpy()[:, None, :], weight.float().numpy()[None, :, :]
    total: Floats = start.numpy().copy()
    for step in range(0, x.shape[1], amx.STEP):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for k in range(step, step + amx.STEP, 2):
            even += left[..., k] * right[..., k]
            odd += left[..., k + 1] * right[..., k + 1]
        total += even + odd
    return torch.from_numpy(total)


def dot_sums(x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return `sums_of` dots: the second number of each pair comes before the first."""
    left, right = x.float().numpy()[:, None, :], weight.float().numpy()[None, :, :]
    total: Floats = start.numpy().copy()
    for k in range(0, x.shape[1], 2):
        total += left[..., k + 1] * right[..., k + 1]
        total += left[..., k] * right[..., k]
    return torch.from_numpy(total)


@instruction(types.void, types.int64)
def _store_configuration(b: ir.IRBuilder, address: Any) -> None:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte])
    store = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sttilecfg")
    b.call(store, [b.inttoptr(address, byte)])


def holds_tiles() -> bool:
    """Whether this thread has a configuration of tiles that nobody released."""

    @njit
    def ask(address):  # type: ignore[no-untyped-def]
        _store_configuration(address)

    layout = np.ones(64, np.uint8)
    ask(layout.ctypes.data)
    return bool(layout.any())
