"""Transformer operators over a paged KV cache; the pool's device selects the backend.

Each function checks its arguments against `kernels.contract`, which explains shapes and notation,
then calls the backend.  Importing this package imports neither torch nor a backend, because
transformers probes for a package named `kernels` and reads its `__version__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

from kernels import contract
from kernels.contract import (
    GELU_TANH,
    SAMPLING,
    SILU,
    Activation,
    Backend,
    KernelError,
    PagedBatch,
    Rectangle,
    ShapeError,
    Softmax,
)

if TYPE_CHECKING:
    import torch

__version__ = "0.2.0"
__all__ = [
    "GELU_TANH",
    "SAMPLING",
    "SILU",
    "Activation",
    "KernelError",
    "PagedBatch",
    "Rectangle",
    "ShapeError",
    "Softmax",
    "add_rms_norm",
    "backend_of",
    "check_pool",
    "draw",
    "expert_mlp",
    "gate",
    "pack_kv",
    "paged_attention",
    "rms_norm",
    "rotate_and_append",
    "route",
    "unpack_kv",
]

# Module of the backend for each device type.
_BACKENDS = {"cpu": "kernels.cpu.backend", "cuda": "kernels.cuda.backend"}


@cache
def backend_of(device_type: str) -> Backend:
    """Return the backend for "cpu" or "cuda", importing it the first time.

    Raises:
        KernelError: There is no backend for this device type.
    """
    module = _BACKENDS.get(device_type)
    if module is None:
        raise KernelError(f"no kernels for device {device_type!r}, only {', '.join(_BACKENDS)}")
    return cast(Backend, import_module(module))


def check_pool(pool: torch.Tensor) -> None:
    """Check once, at startup, that the device's kernels support this pool.

    Raises:
        KernelError: The pool's size or dtype is not supported; the message names it.
    """
    backend_of(pool.device.type).check_pool(pool)


def rotate_and_append(
    heads: torch.Tensor,
    rotation: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Return one layer's rotated queries of this step; write its keys and values to their slots.

    Args:
        heads: [T, Hq + 2 Hkv, D] of a float dtype: queries, keys, values.
        rotation: [T, 2, D / 2] float32 cosines and sines that rotate queries and keys: (x, y) -> (x
            cos - y sin, y cos + x sin) for each pair of dimensions (i, i + D / 2).
        pool: [N, L, 2, Hkv, B, D].
        norm: [Hq + Hkv, D] float32 weights of an RMS norm of each query and key before the
            rotation, x / sqrt(mean(x^2) + eps) * norm; None for no norm.

    Returns:
        [T, Hq, D] in the dtype of `heads`, newly allocated.  Only results are rounded.

    Raises:
        ShapeError: The arguments do not fit each other.
    """
    contract.check_heads(heads, rotation, pool, layer, batch, norm)
    backend = backend_of(pool.device.type)
    return backend.rotate_and_append(heads, rotation, pool, layer, batch, norm, eps)


def paged_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, batch: PagedBatch, softmax: Softmax
) -> torch.Tensor:
    """Compute causal attention of each sequence's queries to its own KV, in prefill and decode.

    Query i of sequence s has position context_lens[s] - (number of its queries) + i.  This step's
    KV must have been appended before.  Blocks that lie wholly before every query's window are not
    read; other keys and values outside a window may be read and must be finite.

    Args:
        query: [T, Hq, D]; query head h reads KV head h // (Hq / Hkv).
        pool: [N, L, 2, Hkv, B, D].

    Returns:
        [T, Hq, D] in the query's dtype; sums are accumulated in float32 or float64.

    Raises:
        ShapeError: The arguments do not fit each other.
    """
    contract.check_attention(query, pool, layer, batch, softmax)
    return backend_of(pool.device.type).paged_attention(query, pool, layer, batch, softmax)


def pack_kv(
    pool: torch.Tensor,
    block_table: Sequence[int],
    rectangle: Rectangle,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Copy a rectangle (layers, heads, tokens) of one sequence's KV from its blocks to a segment.

    Returns:
        [l, 2, h, t, D] in the order of the wire, newly allocated, contiguous, on the pool's device,
        of `dtype` (the pool's if None).

    Raises:
        ShapeError: The rectangle is empty, outside the pool, or beyond the block table.
    """
    contract.check_rectangle(pool, block_table, rectangle)
    backend = backend_of(pool.device.type)
    return backend.pack_kv(pool, block_table, rectangle, dtype or pool.dtype)


def unpack_kv(
    pool: torch.Tensor, block_table: Sequence[int], rectangle: Rectangle, segment: torch.Tensor
) -> None:
    """Copy a segment received from the wire into a sequence's blocks, converting it to their dtype.

    Args:
        segment: [l, 2, h, t, D] of any float dtype, on the pool's device or the CPU.

    Raises:
        ShapeError: The rectangle is empty or outside the pool, or the segment does not fit it.
    """
    contract.check_rectangle(pool, block_table, rectangle)
    contract.check_segment(pool, rectangle, segment)
    backend_of(pool.device.type).unpack_kv(pool, block_table, rectangle, segment)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight for [T, K] rows, weight [K] float32."""
    return backend_of(x.device.type).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `added` to x in place and return `rms_norm` of the sum; both are [T, K] of one dtype."""
    return backend_of(x.device.type).add_rms_norm(x, added, weight, eps)


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return activation(gate) * up, [T, K]; `gate_up` is [T, 2 K], gate first."""
    return backend_of(gate_up.device.type).gate(gate_up, activation)


def route(
    logits: torch.Tensor, top_k: int, *, is_normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k` likeliest experts of each token by the softmax of its [T, E] logits.

    Returns:
        The experts' numbers, [T, top_k], the likeliest first, and their shares, [T, top_k] float32:
        each expert's probability, divided by the sum over the chosen experts if `is_normalized`.
    """
    return backend_of(logits.device.type).route(logits, top_k, is_normalized)


def expert_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return for each token the sum over its experts of share * down(gate(gate_up(x))), [T, K].

    All tokens of one expert are multiplied in one matrix product.

    Args:
        x: [T, K].
        experts: [T, top_k] numbers of experts; these and their `shares` are what `route` returns.
        gate_up: [E, 2 N, K], gate first; `down` is [E, K, N].
        biases: [E, 2 N] and [E, K], added to the results of gate_up and of down; None for none.

    Raises:
        ShapeError: The arguments do not fit each other.
    """
    contract.check_experts(x, experts, shares, gate_up, down, biases)
    return backend_of(x.device.type).expert_mlp(
        x, experts, shares, gate_up, down, activation, biases
    )


def draw(
    logits: torch.Tensor, settings: torch.Tensor | None = None, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw a token for each row with probability exp((logit - largest) / temperature), filtered.

    Filters apply in this order, and all ties at a threshold pass: top_k keeps logits not below the
    k-th largest; top_p keeps the likeliest tokens whose share of the remaining weight first reaches
    it; min_p keeps weights of at least `min_p` times the largest.  The result is the first token,
    in the order of ids, at which the cumulative weight exceeds `uniform` times the sum.  At
    temperature 0 it is the first of the largest logits.  On a GPU nothing waits for the result.

    Args:
        logits: [R, V] of a float dtype.
        settings: [R, 5] int64, rows of SAMPLING; None for temperature 0 in every row.
        allowed: [R, words] int32 bit masks of the allowed tokens, 32 tokens per word, lowest bit
            first; tokens beyond the last word are not allowed.  None allows all tokens.

    Returns:
        [R] int64 token ids on the logits' device, where all arguments must be; -1 where no token is
        allowed.

    Raises:
        ShapeError: The arguments do not fit each other.
    """
    contract.check_draw(logits, settings, allowed)
    return backend_of(logits.device.type).draw(logits, settings, allowed)
