"""What bfloat16 products are compared with, and what they leave of the processor's tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from kernels.cpu import amx
from kernels.cpu.intrinsics import instruction

Floats = npt.NDArray[np.float32]
# Where the processor has no tiles what needs them is left out, and says so.
WAYS = [False, True] if amx.available() else [False]


def tile_sums(x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return start + x W^T of bfloat16 x [T, K] and W [N, K], K of whole steps, summed as tiles do.

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
