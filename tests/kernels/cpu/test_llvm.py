"""Pieces of LLVM, put together in one loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from kernels.cpu import llvm
from kernels.cpu.intrinsics import instruction
from kernels.cpu.llvm import F32, Loop, i64

FLOATS = ir.VectorType(F32, 4)


@instruction(types.void, *[types.int64] * 3)
def _mixed(b: ir.IRBuilder, source: Any, target: Any, count: Any) -> None:
    """Write for each four numbers the even ones of both, clamped, times the first, plus 1."""
    loop = Loop(b, count, 2)
    number = loop.carry(i64(0))
    at = b.mul(loop.index, i64(16))
    x, y = (llvm.load(b, b.add(source, b.add(at, i64(offset))), FLOATS) for offset in (0, 16))
    even = llvm.shuffled(b, x, y, [0, 2, 4, 6])
    even = llvm.larger(b, even, llvm.vector_of(FLOATS, 0.0))
    even = llvm.smaller(b, even, llvm.vector_of(FLOATS, 9.0))
    first = llvm.splat(b, llvm.load(b, source, F32), 4)
    total = llvm.in_order(b, llvm.fma(b, even, first, llvm.vector_of(FLOATS, 1.0)))
    llvm.store(b, total, b.add(target, b.mul(number, i64(16))))
    loop.end([b.add(number, i64(1))])


@njit
def mix(source, target, count):  # type: ignore[no-untyped-def]
    _mixed(source, target, count)


def test_a_loop_of_loads_shuffles_products_and_stores() -> None:
    source = np.random.default_rng(1).normal(5, 5, (6, 4)).astype(np.float32)
    target = np.zeros((4, 4), np.float32)
    mix(source.ctypes.data, target.ctypes.data, len(source))
    want = source[:, ::2].reshape(3, 4).clip(0, 9) * source[0, 0] + 1
    np.testing.assert_allclose(target[:3], want, rtol=1e-6)
    assert not target[3].any()
