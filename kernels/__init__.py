"""The operators of a transformer over paged KV: tensors in, tensors out, chosen by device.

Each function checks its arguments against `kernels.contract` (shapes and notation are explained
there) and calls the backend of the pool's device.  Importing this package imports neither torch
nor a backend: another package of this name is probed by transformers, which reads `__version__`.
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
    ShapeError,
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
    "ShapeError",
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

# Device type to the module that serves it.
_BACKENDS = {"cpu": "kernels.cpu.backend", "cuda": "kernels.cuda.backend"}


@cache
def backend_of(device_type: str) -> Backend:
    """Return the backend for "cpu" or "cuda", importing it the first time.

    Raises:
        KernelError: No backend serves that kind of device.
    """
    module = _BACKENDS.get(device_type)
    if module is None:
        raise KernelError(f"no kernels for device {device_type!r}, only {', '.join(_BACKENDS)}")
    return cast(Backend, import_module(module))


def check_pool(pool: torch.Tensor) -> None:
    """Check once, at the start, that the device's kernels serve such a pool.

    Raises:
        KernelError: They do not; says which size or dtype is wrong.
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
    """Return this step's queries of one layer, rotated; write its keys and values to their slots.

    Args:
        heads: [T, Hq + 2 Hkv, D] of a float dtype: queries, keys, values.
        rotation: [T, 2, D / 2] float32 cosines and sines by which queries and keys are rotated:
            (x, y) -> (x cos - y sin, y cos + x sin) of the pairs (i, i + D / 2).
        pool: [N, L, 2, Hkv, B, D].
        norm: [Hq + Hkv, D] float32: before that each query and key becomes
            x / sqrt(mean(x^2) + eps) * norm; None for no such norm.

    Returns:
        [T, Hq, D] in the dtype of `heads`, new.  Nothing is rounded before the results are.

    Raises:
        ShapeError: The arguments do not fit each other.
    """
    contract.check_heads(heads, rotation, pool, layer, batch, norm)
    backend = backend_of(pool.device.type)
    return backend.rotate_and_append(heads, rotation, pool, layer, batch, norm, eps)


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally to a sequence's own KV; prompts and generation side by side.

    The query of position p sees positions (p - window, p], or [0, p] without a window; query i of
    sequence s has position context_lens[s] - (its queries) + i.  KV of this step is appended first.
    Of keys and values that no query sees, those in a block with some that one sees may be read, and
    must be finite; whole blocks before are not looked at.

    Args:
        query: [T, Hq, D]; query head h reads KV head h // (Hq / Hkv).
        pool: [N, L, 2, Hkv, B, D].
        cap: A score s, scaled, becomes cap * tanh(s / cap); None for none.
        sinks: [Hq] float32 on the pool's device: a score of each head that takes its share of the
            softmax beside those of the keys, uncapped, and has no value.  None for none.

    Returns:
        [T, Hq, D] in the query's dtype; sums are taken in float32 at least.

    Raises:
        ShapeError: The arguments do not fit each other.
    """
    contract.check_attention(query, pool, layer, batch, window, cap, sinks)
    return backend_of(pool.device.type).paged_attention(
        query, pool, layer, batch, scale, window, cap, sinks
    )


def pack_kv(
    pool: torch.Tensor,
    block_table: Sequence[int],
    layers: range,
    tokens: range,
    dtype: torch.dtype | None = None,
    heads: range | None = None,
) -> torch.Tensor:
    """Copy a rectangle of one sequence's KV out of its blocks, in the order of the wire.

    Args:
        heads: The KV heads; None for all of them.

    Returns:
        [l, 2, h, t, D], new, contiguous, on the pool's device, of `dtype` (the pool's if None).

    Raises:
        ShapeError: The rectangle is empty, outside the pool, or beyond the block table.
    """
    heads = range(pool.shape[3]) if heads is None else heads
    contract.check_rectangle(pool, block_table, layers, tokens, heads)
    backend = backend_of(pool.device.type)
    return backend.pack_kv(pool, block_table, layers, tokens, dtype or pool.dtype, heads)


def unpack_kv(
    pool: torch.Tensor,
    block_table: Sequence[int],
    layers: range,
    tokens: range,
    segment: torch.Tensor,
    heads: range | None = None,
) -> None:
    """Copy a segment of the wire into one sequence's blocks, converting to the pool's dtype.

    Args:
        segment: [l, 2, h, t, D] of any float dtype, on the pool's device or the CPU.
        heads: The KV heads; None for all of them.

    Raises:
        ShapeError: The rectangle is empty, outside the pool, or the segment does not fit it.
    """
    heads = range(pool.shape[3]) if heads is None else heads
    contract.check_rectangle(pool, block_table, layers, tokens, heads)
    contract.check_segment(pool, layers, tokens, heads, segment)
    backend_of(pool.device.type).unpack_kv(pool, block_table, layers, tokens, segment, heads)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight for [T, K] rows, weight [K] float32."""
    return backend_of(x.device.type).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add to x in place, and return `rms_norm` of the sum; both [T, K] of one dtype."""
    return backend_of(x.device.type).add_rms_norm(x, added, weight, eps)


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return activation(gate) * up, [T, K], for [T, 2 K]: gate first, then up."""
    return backend_of(gate_up.device.type).gate(gate_up, activation)


def route(
    logits: torch.Tensor, top_k: int, *, is_normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k` likeliest experts of each token, by the softmax of [T, E] logits.

    Returns:
        [T, top_k] which, the likeliest first, and [T, top_k] float32 the share of each: its part of
        all experts' weight, or of the chosen ones' if `is_normalized`.
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
    """Return the sum over a token's experts of share * down(gate(gate_up(x))), [T, K].

    The tokens that go to one expert are one product.

    Args:
        x: [T, K].
        experts: [T, top_k] which, and `shares` of each, as `route` returns them.
        gate_up: [E, 2 N, K], gate first; `down` [E, K, N].
        biases: [E, 2 N] and [E, K], added to the products of both; None for none.

    Raises:
        ShapeError: The arguments do not fit each other.
    """
    contract.check_experts(x, experts, shares, gate_up, down, biases)
    return backend_of(x.device.type).expert_mlp(
        x, experts, shares, gate_up, down, activation, biases
    )


def draw(
    logits: torch.Tensor,
    settings: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose a token for each row at random: weight exp((logit - largest) / temperature), filtered.

    Filters apply in this order, and ties at a border all pass: top_k keeps logits not below the
    k-th largest; top_p the likeliest tokens whose share of the weight left first reaches it; min_p
    weights not below so much of the largest.  Then the first token is chosen, in the order of ids,
    at which the cumulated weight exceeds `uniform` times the sum.  At temperature 0 it is the first
    of the largest.  On a GPU nothing waits for the result.

    Args:
        logits: [R, V] of a float dtype.
        settings: [R, 5] int64, rows of SAMPLING; None: temperature 0 in every row.
        allowed: [R, words] int32, the bits of the tokens to choose from, 32 in a word, the lowest
            first; none beyond the last word.  None: all tokens.

    Returns:
        [R] int64 token ids, on the device of the logits, as the arguments are; -1 where no token is
        allowed.

    Raises:
        ShapeError: The arguments do not fit each other.
    """
    contract.check_draw(logits, settings, allowed)
    return backend_of(logits.device.type).draw(logits, settings, allowed)
