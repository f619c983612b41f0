"""What stands between the matrices of a transformer, each in one pass over float32 rows on the CPU.

Torch makes three to six passes, and as many tensors, of each of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.cpu.intrinsics import bfloat16_at, exp2, float16_at, floats_at, ints_at
from kernels.cpu.linear import ELEMENTS, PackedWeight
from kernels.cpu.program import Operation
from kernels.cpu.simd import BFLOAT16, FLOAT32, PANEL, bytes_of
from kernels.cpu.tasks import comparing, inner
from kernels.cpu.threads import take

# The most rows that a thread takes at a time.
_MAX_TAKEN = 8
_MINUS_LOG2_E = np.float32(-1.4426950408889634)


class _NormArguments(NamedTuple):
    num_rows: int
    at_a_time: int
    size: int
    x: int
    out: int
    weight: int
    eps: float
    rows: int  # 0 for all
    taken: int = 0


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> Operation:
    """Make out = x / sqrt(mean(x^2) + eps) * weight, of the rows named or of all.

    Args:
        x: [T, K] float32, contiguous; `weight` [K] likewise.
        out: [R, K] float32, contiguous.
        rows: [R] int32 rows of x; None where R is T.
    """
    arguments = _NormArguments(
        num_rows=len(out),
        at_a_time=_at_a_time(len(out)),
        size=x.shape[1],
        x=x.data_ptr(),
        out=out.data_ptr(),
        weight=weight.data_ptr(),
        eps=eps,
        rows=0 if rows is None else rows.data_ptr(),
    )
    return Operation(_norm, arguments, (x, weight, out, rows))


def _norm(a: _NormArguments, _thread: int) -> None:
    while True:
        first = take(a, a.at_a_time)
        if first >= a.num_rows:
            return
        for row in range(first, min(first + a.at_a_time, a.num_rows)):
            _norm_row(a, row)


@inner
def _norm_row(a: _NormArguments, row: int) -> None:
    size = a.size
    source = np.int64(ints_at(a.rows)[row]) if a.rows else row
    x, out = floats_at(a.x + source * size * 4), floats_at(a.out + row * size * 4)
    weight: Any = floats_at(a.weight)
    total = np.float32(0)
    for i in range(size):
        total += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + a.eps)
    for i in range(size):
        out[i] = x[i] * scale * weight[i]


class _GateArguments(NamedTuple):
    num_rows: int
    at_a_time: int
    size: int
    gate_up: int
    out: int
    taken: int = 0


def silu_gate(gate_up: torch.Tensor, out: torch.Tensor) -> Operation:
    """Make out = silu(gate) * up.

    Args:
        gate_up: [T, 2 K] float32, contiguous: gate first, then up.
        out: [T, K] float32, contiguous.
    """
    arguments = _GateArguments(
        num_rows=len(out),
        at_a_time=_at_a_time(len(out)),
        size=out.shape[1],
        gate_up=gate_up.data_ptr(),
        out=out.data_ptr(),
    )
    return Operation(_gate, arguments, (gate_up, out))


def _gate(a: _GateArguments, _thread: int) -> None:
    while True:
        first = take(a, a.at_a_time)
        if first >= a.num_rows:
            return
        for row in range(first, min(first + a.at_a_time, a.num_rows)):
            _gate_row(a, row)


@inner
def _gate_row(a: _GateArguments, row: int) -> None:
    size = a.size
    gate = floats_at(a.gate_up + row * size * 8)
    up = floats_at(a.gate_up + row * size * 8 + size * 4)
    out = floats_at(a.out + row * size * 4)
    one = np.float32(1)
    for i in range(size):
        x = gate[i]
        # e^-|x| never overflows; the other half of the sigmoid is its complement.
        small = exp2(abs(x) * _MINUS_LOG2_E)
        out[i] = x * up[i] * (one if x >= 0 else small) / (one + small)


class _EmbedArguments(NamedTuple):
    num_rows: int
    at_a_time: int
    size: int
    token_ids: int
    table: int
    element: int
    row_stride: int  # from a row to the next of its panel
    stride: int  # from an element of a row to the next
    out: int
    taken: int = 0


def embed(
    token_ids: torch.Tensor, weight: torch.Tensor | PackedWeight, out: torch.Tensor
) -> Operation:
    """Make out = the rows of weight, as float32.

    Args:
        token_ids: [T] int32.
        weight: [V, K], contiguous, or packed.
        out: [T, K] float32, contiguous.
    """
    table = weight.panels if isinstance(weight, PackedWeight) else weight
    size = out.shape[1]
    row_stride, stride = (1, PANEL) if isinstance(weight, PackedWeight) else (size, 1)
    arguments = _EmbedArguments(
        num_rows=len(token_ids),
        at_a_time=_at_a_time(len(token_ids)),
        size=size,
        token_ids=token_ids.data_ptr(),
        table=table.data_ptr(),
        element=ELEMENTS[table.dtype],
        row_stride=row_stride * table.itemsize,
        stride=stride * table.itemsize,
        out=out.data_ptr(),
    )
    return Operation(_embed, arguments, (table, out, token_ids))


def _embed(a: _EmbedArguments, _thread: int) -> None:
    while True:
        first = take(a, a.at_a_time)
        if first >= a.num_rows:
            return
        for row in range(first, min(first + a.at_a_time, a.num_rows)):
            _embed_row(a, row)


@inner
def _embed_row(a: _EmbedArguments, row: int) -> None:
    size, element, stride = a.size, a.element, a.stride
    out = floats_at(a.out + row * size * 4)
    token_id = np.int64(ints_at(a.token_ids)[row])
    panel_bytes = size * PANEL * bytes_of(element)
    at = a.table + token_id // PANEL * panel_bytes + token_id % PANEL * a.row_stride
    for i in range(size):
        if element == BFLOAT16:
            out[i] = bfloat16_at(at + i * stride)
        elif element == FLOAT32:
            out[i] = floats_at(at + i * stride)[0]
        else:
            out[i] = float16_at(at + i * stride)


def _at_a_time(num_rows: int) -> int:
    """Return how many rows a thread takes: few rows one by one, a row is some microseconds."""
    return max(1, min(_MAX_TAKEN, num_rows // _MAX_TAKEN))


@comparing
def largest(numbers: Any, start: int, stop: int, least: Any) -> Any:
    """Return the largest of some numbers, but not less than `least`."""
    for i in range(start, stop):
        least = numbers[i] if numbers[i] > least else least
    return least
