"""The operations between a transformer's matrix products, each in one pass over float32 rows.

Torch needs three to six passes, and as many tensors, for each of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.contract import Activation
from kernels.cpu.intrinsics import bfloat16_at, bytes_at, exp2, float16_at, floats_at, ints_at
from kernels.cpu.linear import ELEMENTS, PackedWeight
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.linear_int8 import Int8Weight
from kernels.cpu.program import Operation
from kernels.cpu.rows_int8 import INT8, round_row
from kernels.cpu.simd import BFLOAT16, FLOAT32, PANEL, bytes_of, narrow
from kernels.cpu.simd_int8 import QUAD
from kernels.cpu.tasks import allocate, comparing, free, inner
from kernels.cpu.threads import for_each_row

_MINUS_LOG2_E = np.float32(-1.4426950408889634)


class _NormArguments(NamedTuple):
    num_rows: int
    size: int
    x: int
    out: int
    out_element: int
    out_stride: int
    weight: int
    eps: float
    rows: int  # 0 for all
    is_added: bool
    taken: int = 0


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    is_added: bool = False,
) -> Operation:
    """Return the operation out = x / sqrt(mean(x^2) + eps) * weight for some rows or all.

    If `is_added`, the result is added to the float32 `out`.

    Args:
        x: [T, K] float32, contiguous; `weight` is [K], also float32.
        out: [R, K] float32 or bfloat16 with any row stride, or a buffer from `Int8Weight.inputs`
            for K or more.
        rows: [R] int32 rows of x; None for all, where R is T.
    """
    arguments = _NormArguments(
        num_rows=len(out),
        size=x.shape[1],
        x=x.data_ptr(),
        out=out.data_ptr(),
        out_element=INT8 if out.dtype is torch.int8 else ELEMENTS[out.dtype],
        out_stride=out.stride(0) * out.itemsize,
        weight=weight.data_ptr(),
        eps=eps,
        rows=0 if rows is None else rows.data_ptr(),
        is_added=is_added,
    )
    assert out.dtype is torch.float32 or not is_added
    return Operation(_norm, arguments, (x, weight, out, rows))


def _norm(a: _NormArguments, _thread: int) -> None:
    scratch = allocate(a.size * 4)
    for_each_row(a, _norm_row, scratch)
    free(scratch)


@inner
def _norm_row(a: _NormArguments, row: int, scratch: int) -> None:
    size = a.size
    source = np.int64(ints_at(a.rows)[row]) if a.rows else row
    x, weight = floats_at(a.x + source * size * 4), floats_at(a.weight)
    element, out = a.out_element, a.out + row * a.out_stride
    total = np.float32(0)
    for i in range(size):
        total += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + a.eps)
    y = floats_at(out if element == FLOAT32 and not a.is_added else scratch)
    for i in range(size):
        y[i] = x[i] * scale * weight[i]
    if a.is_added:
        for i in range(size):
            floats_at(out)[i] += y[i]
    elif element == INT8:
        round_row(FLOAT32, scratch, size, a.out, row, a.out_stride)
    elif element != FLOAT32:
        narrow(element, scratch, out, size)


class _GateArguments(NamedTuple):
    num_rows: int
    size: int
    gate_up: int
    out: int
    linear: float
    cubic: float
    limit: float
    shift: float
    taken: int = 0


def gate(gate_up: torch.Tensor, out: torch.Tensor, activation: Activation) -> Operation:
    """Return the operation out = activation(gate) * up.

    Args:
        gate_up: [T, 2 K] float32, contiguous: gate first, then up.
        out: [T, K] float32, contiguous.
    """
    arguments = _GateArguments(
        num_rows=len(out),
        size=out.shape[1],
        gate_up=gate_up.data_ptr(),
        out=out.data_ptr(),
        **activation._asdict(),
    )
    return Operation(_gate, arguments, (gate_up, out))


def _gate(a: _GateArguments, _thread: int) -> None:
    for_each_row(a, _gate_row, 0)


@inner
def _gate_row(a: _GateArguments, row: int, _: int) -> None:
    size = a.size
    gate = floats_at(a.gate_up + row * size * 8)
    up = floats_at(a.gate_up + row * size * 8 + size * 4)
    out = floats_at(a.out + row * size * 4)
    one, linear, cubic, limit, shift = np.float32(1), a.linear, a.cubic, a.limit, a.shift
    for i in range(size):
        x = limit if gate[i] > limit else gate[i]
        factor = limit if up[i] > limit else (-limit if up[i] < -limit else up[i])
        steep = x * (linear + cubic * x * x)
        # e^-|x| never overflows; the other half of the sigmoid is its complement.
        small = exp2(abs(steep) * _MINUS_LOG2_E)
        out[i] = x * (factor + shift) * (one if x >= 0 else small) / (one + small)


class _EmbedArguments(NamedTuple):
    num_rows: int
    size: int
    token_ids: int
    table: int
    element: int
    scales: int  # of an int8 table, one for each row
    panel_bytes: int
    together: int  # adjacent elements of a row
    row_stride: int  # from a row to the next in its panel
    stride: int  # from one group of adjacent elements of a row to the next
    factor: float
    out: int
    taken: int = 0


def embed(
    token_ids: torch.Tensor,
    weight: torch.Tensor | PackedWeight | PairedWeight | Int8Weight,
    out: torch.Tensor,
    factor: float = 1.0,
) -> Operation:
    """Return the operation that writes rows of weight, times a factor, to out as float32.

    Args:
        token_ids: [T] int32; a negative id gives a row of zeros.
        weight: [V, K], contiguous, or packed.
        out: [T, K] float32, contiguous.
    """
    table = weight if isinstance(weight, torch.Tensor) else weight.panels
    size = out.shape[1]
    together, row_stride, stride = 1, size, 1
    if isinstance(weight, PackedWeight):
        row_stride, stride = 1, PANEL
    elif isinstance(weight, PairedWeight):
        together, row_stride, stride = 2, 2, 2 * PANEL
    elif isinstance(weight, Int8Weight):
        together, row_stride, stride = QUAD, QUAD, QUAD * PANEL
    scales = weight.scales if isinstance(weight, Int8Weight) else None
    arguments = _EmbedArguments(
        num_rows=len(token_ids),
        size=size,
        token_ids=token_ids.data_ptr(),
        table=table.data_ptr(),
        element=ELEMENTS[table.dtype] if scales is None else INT8,
        scales=0 if scales is None else scales.data_ptr(),
        panel_bytes=PANEL * size * table.itemsize if table is weight else table[:1].nbytes,
        together=together,
        row_stride=row_stride * table.itemsize,
        stride=stride * table.itemsize,
        factor=factor,
        out=out.data_ptr(),
    )
    return Operation(_embed, arguments, (table, scales, out, token_ids))


def _embed(a: _EmbedArguments, _thread: int) -> None:
    for_each_row(a, _embed_row, 0)


@inner
def _embed_row(a: _EmbedArguments, row: int, _: int) -> None:
    size, element, stride, together = a.size, a.element, a.stride, a.together
    out = floats_at(a.out + row * size * 4)
    token_id = np.int64(ints_at(a.token_ids)[row])
    if token_id < 0:
        for i in range(size):
            out[i] = np.float32(0)
        return
    scale = floats_at(a.scales)[token_id] if element == INT8 else np.float32(0)
    factor = a.factor
    size_of = 1 if element == INT8 else bytes_of(element)
    panel = a.table + token_id // PANEL * a.panel_bytes + token_id % PANEL * a.row_stride
    for i in range(size):
        at = panel + i // together * stride + i % together * size_of
        if element == INT8:
            out[i] = np.float32(bytes_at(at)[0]) * scale * factor
        elif element == BFLOAT16:
            out[i] = bfloat16_at(at) * factor
        elif element == FLOAT32:
            out[i] = floats_at(at)[0] * factor
        else:
            out[i] = float16_at(at) * factor


@comparing
def largest(numbers: Any, start: int, stop: int, least: Any) -> Any:
    """Return the largest of numbers[start:stop] and `least`."""
    for i in range(start, stop):
        least = numbers[i] if numbers[i] > least else least
    return least
