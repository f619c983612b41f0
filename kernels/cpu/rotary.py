"""Heads after their projection: normalized if the model says so, rotated, KV put into the pool.

One pass over a token's query, key and value heads, while the first cache has them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from kernels.cpu.intrinsics import (
    bits_of,
    fetch_add,
    float_of_bits,
    floats_at,
    ints_at,
    put_brain,
    put_half,
)
from kernels.cpu.linear import ELEMENTS
from kernels.cpu.program import Operation
from kernels.cpu.threads import compiled, inner


def place(
    heads: torch.Tensor,
    rotation: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> Operation:
    """Rotate queries where they lie; put keys, rotated, and values into the pool, in its dtype.

    Pairs are (i, i + D / 2): (x, y) -> (x cos - y sin, y cos + x sin).

    Args:
        heads: [T, Hq + 2 Hkv, D] float32, contiguous: queries, keys, values; keys are changed too.
        rotation: [T, 2, D / 2] float32, contiguous: cos, sin.
        pool: [N, L, 2, Hkv, B, D].
        slots: [T] int32.
        norm: [Hq + Hkv, D] float32 weights by which each head is normalized before, or None.
    """
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    rows, num_heads, _ = heads.shape
    words = (
        rows,
        heads.data_ptr(),
        num_heads,
        num_kv_heads,
        head_dim,
        rotation.data_ptr(),
        0 if norm is None else norm.data_ptr(),
        bits_of(eps),
        slots.data_ptr(),
        pool[0, layer].data_ptr(),
        ELEMENTS[pool.dtype],
        num_layers * 2 * num_kv_heads * block_size * head_dim * pool.itemsize,
        block_size,
    )
    return Operation(task(), words, (heads, rotation, pool, norm, slots))


@cache
def task() -> Any:
    """Return the compiled loop over tokens."""
    return compiled(_place)


def _place(words, _thread):  # type: ignore[no-untyped-def]
    rows = words[2]
    while True:
        row = fetch_add(words[0], 1)
        if row >= rows:
            return
        num_heads, num_kv_heads, size = words[4], words[5], words[6]
        first = words[3] + row * num_heads * size * 4
        for head in range(num_heads - num_kv_heads):
            at = first + head * size * 4
            if words[8]:
                _norm_head(at, words[8] + head * size * 4, float_of_bits(words[9]), size)
            _rotate_head(at, words[7] + row * size * 4, size // 2)
        slot = np.int64(ints_at(words[10])[row])
        block = words[11] + slot // words[14] * words[13]
        for head in range(2 * num_kv_heads):
            at = first + (num_heads - 2 * num_kv_heads + head) * size * 4
            _store_head(words[12], at, block, head * words[14] + slot % words[14], size)


@inner
def _norm_head(at, weights, eps, size):  # type: ignore[no-untyped-def]
    x, weight = floats_at(at), floats_at(weights)
    total = np.float32(0)
    for i in range(size):
        total += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        x[i] = x[i] * scale * weight[i]


@inner
def _rotate_head(at, rotation, half):  # type: ignore[no-untyped-def]
    left, right = floats_at(at), floats_at(at + half * 4)
    cos, sin = floats_at(rotation), floats_at(rotation + half * 4)
    for i in range(half):
        x, y = left[i], right[i]
        left[i] = x * cos[i] - y * sin[i]
        right[i] = y * cos[i] + x * sin[i]


@inner
def _store_head(element, source, block, row, size):  # type: ignore[no-untyped-def]
    values = floats_at(source)
    if element == 0:
        target = floats_at(block + row * size * 4)
        for i in range(size):
            target[i] = values[i]
    elif element == 1:
        for i in range(size):
            put_brain(block + (row * size + i) * 2, values[i])
    else:
        for i in range(size):
            put_half(block + (row * size + i) * 2, values[i])
