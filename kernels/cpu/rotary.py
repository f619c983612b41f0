"""Norm and rotate heads after their projection, and write keys and values to the pool.

One pass over a token's query, key and value heads, while they are in the L1 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.cpu.intrinsics import floats_at, ints_at
from kernels.cpu.linear import ELEMENTS
from kernels.cpu.program import Operation
from kernels.cpu.simd import FLOAT32, WIDTH, narrow
from kernels.cpu.tasks import inner
from kernels.cpu.threads import for_each_row


class _Arguments(NamedTuple):
    num_rows: int
    heads: int
    num_heads: int  # of queries, keys and values together
    num_kv_heads: int
    head_dim: int
    rotation: int
    norm: int  # 0 for none
    eps: float
    slots: int
    pool: int  # address of the layer in the first block
    element: int
    block_bytes: int
    block_size: int
    taken: int = 0


def rotate_and_append(
    heads: torch.Tensor,
    rotation: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> Operation:
    """Return the operation that rotates queries in place and writes rotated keys and values.

    Keys and values go to the pool, in its dtype.  Pairs of dimensions (i, i + D / 2) are rotated:
    (x, y) -> (x cos - y sin, y cos + x sin).

    Args:
        heads: [T, Hq + 2 Hkv, D] float32, contiguous: queries, keys, values; keys are changed in
            place too.  D is a multiple of 8.
        rotation: [T, 2, D / 2] float32, contiguous: cos, sin.
        pool: [N, L, 2, Hkv, B, D].
        slots: [T] int32.
        norm: [Hq + Hkv, D] float32 weights of an RMS norm of each head before the rotation, or
            None.
    """
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    num_tokens, num_heads, _ = heads.shape
    assert head_dim % WIDTH == 0
    arguments = _Arguments(
        num_rows=num_tokens,
        heads=heads.data_ptr(),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotation=rotation.data_ptr(),
        norm=0 if norm is None else norm.data_ptr(),
        eps=eps,
        slots=slots.data_ptr(),
        pool=pool[0, layer].data_ptr(),
        element=ELEMENTS[pool.dtype],
        block_bytes=num_layers * 2 * num_kv_heads * block_size * head_dim * pool.itemsize,
        block_size=block_size,
    )
    return Operation(_rotate_and_append, arguments, (heads, rotation, pool, norm, slots))


def _rotate_and_append(a: _Arguments, _thread: int) -> None:
    for_each_row(a, _rotate_token, 0)


@inner
def _rotate_token(a: _Arguments, token: int, _: int) -> None:
    num_heads, num_kv_heads, size = a.num_heads, a.num_kv_heads, a.head_dim
    first = a.heads + token * num_heads * size * 4
    for head in range(num_heads - num_kv_heads):
        at = first + head * size * 4
        if a.norm:
            _norm_head(at, a.norm + head * size * 4, a.eps, size)
        _rotate_head(at, a.rotation + token * size * 4, size // 2)
    slot: Any = np.int64(ints_at(a.slots)[token])
    block = a.pool + slot // a.block_size * a.block_bytes
    for head in range(2 * num_kv_heads):
        at = first + (num_heads - 2 * num_kv_heads + head) * size * 4
        _store_head(a.element, at, block, head * a.block_size + slot % a.block_size, size)


@inner
def _norm_head(at: int, weights: int, eps: float, size: int) -> None:
    x, weight = floats_at(at), floats_at(weights)
    total = np.float32(0)
    for i in range(size):
        total += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        x[i] = x[i] * scale * weight[i]


@inner
def _rotate_head(at: int, rotation: int, half: int) -> None:
    left, right = floats_at(at), floats_at(at + half * 4)
    cos, sin = floats_at(rotation), floats_at(rotation + half * 4)
    for i in range(half):
        x, y = left[i], right[i]
        left[i] = x * cos[i] - y * sin[i]
        right[i] = y * cos[i] + x * sin[i]


@inner
def _store_head(element: int, source: int, block: int, row: int, size: int) -> None:
    values = floats_at(source)
    if element == FLOAT32:
        target = floats_at(block + row * size * 4)
        for i in range(size):
            target[i] = values[i]
    else:
        narrow(element, source, block + row * size * 2, size)
