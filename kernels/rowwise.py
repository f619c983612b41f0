"""What stands between the matrices of a transformer, each in one pass over float32 rows on the CPU.

Torch makes three to six passes, and as many tensors, of each of these; at one row its calls cost
more than the arithmetic.  A few rows are done on the calling thread, many are shared.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from kernels.scalars import bits_of, exp2, fetch_add, float_of_bits, floats_at
from kernels.team import compiled, inner, run

_NORM, _GATE, _ROTATE = range(3)
# Fewer elements than this are done before another thread would have woken up.
_ALONE = 1 << 15
_STEP = 8
_MINUS_LOG2_E = np.float32(-1.4426950408889634)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight for [T, K] float32 rows, weight [K] float32."""
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, size = x.shape
    _run(_NORM, rows, size, x.data_ptr(), out.data_ptr(), weight.data_ptr(), bits_of(eps))
    return out


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [T, K], for contiguous [T, 2 K] float32: gate first, then up."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size)
    _run(_GATE, rows, size, gate_up.data_ptr(), out.data_ptr(), 0, 0)
    return out


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate [T, H, D] in place: pairs (i, i + D / 2), float32, heads of a token side by side.

    Args:
        cos: [T, D / 2], contiguous; `sin` likewise.
    """
    rows, num_heads, head_dim = heads.shape
    words = (heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), heads.stride(0) * 4, num_heads)
    _run(_ROTATE, rows, head_dim, *words)


def _run(operation: int, rows: int, size: int, *words: int) -> None:
    if rows:
        run(task(), [operation, rows, size, *words], int(rows * size < _ALONE))


@cache
def task() -> Any:
    """Return the compiled loop over rows."""
    return compiled(_rows)


def _rows(words):  # type: ignore[no-untyped-def]
    operation, rows = words[2], words[3]
    while True:
        first = fetch_add(words[0], _STEP)
        if first >= rows:
            return
        for row in range(first, min(first + _STEP, rows)):
            if operation == _NORM:
                _norm_row(words, row)
            elif operation == _GATE:
                _gate_row(words, row)
            else:
                _rotate_row(words, row)


@inner
def _norm_row(words, row):  # type: ignore[no-untyped-def]
    size = words[4]
    x, out = floats_at(words[5] + row * size * 4), floats_at(words[6] + row * size * 4)
    weight, eps = floats_at(words[7]), float_of_bits(words[8])
    total = np.float32(0)
    for i in range(size):
        total += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        out[i] = x[i] * scale * weight[i]


@inner
def _gate_row(words, row):  # type: ignore[no-untyped-def]
    size = words[4]
    gate = floats_at(words[5] + row * size * 8)
    up = floats_at(words[5] + row * size * 8 + size * 4)
    out = floats_at(words[6] + row * size * 4)
    one = np.float32(1)
    for i in range(size):
        x = gate[i]
        # e^-|x| never overflows; the other half of the sigmoid is its complement.
        small = exp2(abs(x) * _MINUS_LOG2_E)
        out[i] = x * up[i] * (one if x >= 0 else small) / (one + small)


@inner
def _rotate_row(words, row):  # type: ignore[no-untyped-def]
    head_dim, num_heads = words[4], words[9]
    half = head_dim // 2
    cos, sin = floats_at(words[6] + row * half * 4), floats_at(words[7] + row * half * 4)
    for head in range(num_heads):
        at = words[5] + row * words[8] + head * head_dim * 4
        left, right = floats_at(at), floats_at(at + half * 4)
        for i in range(half):
            x, y = left[i], right[i]
            left[i] = x * cos[i] - y * sin[i]
            right[i] = y * cos[i] + x * sin[i]
