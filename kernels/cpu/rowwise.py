"""What stands between the matrices of a transformer, each in one pass over float32 rows on the CPU.

Torch makes three to six passes, and as many tensors, of each of these.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from kernels.cpu.intrinsics import (
    bits_of,
    brain_at,
    exp2,
    fetch_add,
    float_of_bits,
    floats_at,
    half_at,
    ints_at,
)
from kernels.cpu.linear import ELEMENTS, PackedWeight
from kernels.cpu.program import Operation
from kernels.cpu.simd import PANEL
from kernels.cpu.threads import comparing, compiled, inner

_NORM, _GATE, _EMBED = range(3)
_STEP = 8
_MINUS_LOG2_E = np.float32(-1.4426950408889634)


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
    indices = 0 if rows is None else rows.data_ptr()
    size = x.shape[1]
    words = (x.data_ptr(), out.data_ptr(), weight.data_ptr(), bits_of(eps), indices)
    return _operation(_NORM, len(out), size, words, (x, weight, out, rows))


def silu_gate(gate_up: torch.Tensor, out: torch.Tensor) -> Operation:
    """Make out = silu(gate) * up.

    Args:
        gate_up: [T, 2 K] float32, contiguous: gate first, then up.
        out: [T, K] float32, contiguous.
    """
    words = (gate_up.data_ptr(), out.data_ptr())
    return _operation(_GATE, len(out), out.shape[1], words, (gate_up, out))


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
    # Bytes from a row to the next of its panel, and from one element of it to the next.
    lane, along = (1, PANEL) if isinstance(weight, PackedWeight) else (size, 1)
    words = (
        table.data_ptr(),
        out.data_ptr(),
        token_ids.data_ptr(),
        ELEMENTS[table.dtype],
        lane * table.itemsize,
        along * table.itemsize,
    )
    return _operation(_EMBED, len(token_ids), size, words, (table, out, token_ids))


def _operation(
    operation: int, rows: int, size: int, words: tuple[int, ...], kept: tuple[Any, ...]
) -> Operation:
    # Few rows are shared one by one: a row of `silu_gate` is some microseconds of work.
    step = max(1, min(_STEP, rows // _STEP))
    return Operation(task(), (operation, rows, size, step, *words), kept)


@cache
def task() -> Any:
    """Return the compiled loop over rows."""
    return compiled(_rows)


def _rows(words, _thread):  # type: ignore[no-untyped-def]
    operation, rows, step = words[2], words[3], words[5]
    while True:
        first = fetch_add(words[0], step)
        if first >= rows:
            return
        for row in range(first, min(first + step, rows)):
            if operation == _NORM:
                _norm_row(words, row)
            elif operation == _GATE:
                _gate_row(words, row)
            else:
                _embed_row(words, row)


@comparing
def largest(numbers, start, stop, least):  # type: ignore[no-untyped-def]
    """Return the largest of some numbers, but not less than `least`."""
    for i in range(start, stop):
        least = numbers[i] if numbers[i] > least else least
    return least


@inner
def _norm_row(words, row):  # type: ignore[no-untyped-def]
    size = words[4]
    source = np.int64(ints_at(words[10])[row]) if words[10] else row
    x, out = floats_at(words[6] + source * size * 4), floats_at(words[7] + row * size * 4)
    weight, eps = floats_at(words[8]), float_of_bits(words[9])
    total = np.float32(0)
    for i in range(size):
        total += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        out[i] = x[i] * scale * weight[i]


@inner
def _gate_row(words, row):  # type: ignore[no-untyped-def]
    size = words[4]
    gate = floats_at(words[6] + row * size * 8)
    up = floats_at(words[6] + row * size * 8 + size * 4)
    out = floats_at(words[7] + row * size * 4)
    one = np.float32(1)
    for i in range(size):
        x = gate[i]
        # e^-|x| never overflows; the other half of the sigmoid is its complement.
        small = exp2(abs(x) * _MINUS_LOG2_E)
        out[i] = x * up[i] * (one if x >= 0 else small) / (one + small)


@inner
def _embed_row(words, row):  # type: ignore[no-untyped-def]
    size, element, lane, along = words[4], words[9], words[10], words[11]
    out = floats_at(words[7] + row * size * 4)
    index = np.int64(ints_at(words[8])[row])
    panel = size * PANEL * (4 if element == 0 else 2)
    at = words[6] + index // PANEL * panel + index % PANEL * lane
    for i in range(size):
        if element == 1:
            out[i] = brain_at(at + i * along)
        elif element == 0:
            out[i] = floats_at(at + i * along)[0]
        else:
            out[i] = half_at(at + i * along)
