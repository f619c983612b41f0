"""LLVM instructions of the vector loops; addresses are int64 values."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()


def i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def vector_of(kind: ir.VectorType, value: float) -> ir.Constant:
    """Return a vector constant of equal lanes."""
    return ir.Constant(kind, [value] * kind.count)


def load(b: ir.IRBuilder, address: Any, kind: ir.Type, align: int = 4) -> Any:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=align)


def store(b: ir.IRBuilder, x: Any, address: Any, align: int = 4) -> Any:
    return b.store(x, b.inttoptr(address, x.type.as_pointer()), align=align)


def call(b: ir.IRBuilder, name: str, result: ir.Type, *operands: Any) -> Any:
    """Call an LLVM intrinsic, named without the prefix `llvm.`"""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.{name}"), operands)


def fma(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    return call(b, f"fma.v{x.type.count}f32", x.type, x, y, z)


def in_order(b: ir.IRBuilder, x: Any) -> Any:
    """Stop LLVM from reassociating this float32 value; tasks are compiled with fast-math flags."""
    return call(b, f"arithmetic.fence.v{x.type.count}f32", x.type, x)


def smaller(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def larger(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def shuffled(b: ir.IRBuilder, x: Any, y: Any, lanes: list[int]) -> Any:
    """Return a vector of some lanes of x and y; the lanes of y are numbered after those of x."""
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def splat(b: ir.IRBuilder, scalar: Any, lanes: int) -> Any:
    """Return a vector of equal lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return shuffled(b, first, undefined, [0] * lanes)


class Loop:
    """A loop over [0, count) in steps of `step` that runs at least once, with carried values."""

    def __init__(self, b: ir.IRBuilder, count: Any, step: int) -> None:
        self._b, self._count, self._step = b, count, step
        self._before = b.block
        self._body = b.append_basic_block("loop")
        b.branch(self._body)
        b.position_at_end(self._body)
        self._carried: list[Any] = []
        self.index = b.phi(I64)
        self.index.add_incoming(i64(0), self._before)

    def carry(self, start: Any) -> Any:
        value = self._b.phi(start.type)
        value.add_incoming(start, self._before)
        self._carried.append(value)
        return value

    def end(self, following: list[Any]) -> None:
        """Close the loop with the next value of each carried one; use these after the loop."""
        b = self._b
        index = b.add(self.index, i64(self._step))
        last = b.block
        self.index.add_incoming(index, last)
        for value, after in zip(self._carried, following, strict=True):
            value.add_incoming(after, last)
        done = b.append_basic_block("done")
        b.cbranch(b.icmp_signed("<", index, self._count), self._body, done)
        b.position_at_end(done)
