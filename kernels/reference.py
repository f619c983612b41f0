"""Reference operators in plain torch on any device; the other backends are tested against them.

The code is written to be read: it computes attention sequence by sequence and draws tokens row by
row.  16-bit values are widened, so sums are float32.  `kernels` documents the operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, pad
from torch.nn.functional import rms_norm as torch_rms_norm

from kernels.contract import SAMPLING, Activation, PagedBatch, Rectangle, Softmax, segment_shape


def check_pool(pool: torch.Tensor) -> None:
    """Accept any pool."""


def rotate_and_append(
    heads: torch.Tensor,
    rotation: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    num_tokens, _, head_dim = heads.shape
    num_kv_heads, block_size = pool.shape[3:5]
    turned = heads[:, :-num_kv_heads].float()
    if norm is not None:
        turned = torch_rms_norm(turned, (head_dim,), None, eps) * norm
    cos, sin = rotation[:, None].unbind(2)
    x, y = turned.chunk(2, dim=-1)
    turned = torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1)
    query, key = turned.tensor_split((-num_kv_heads,), dim=1)
    key_value = torch.cat((key.to(pool.dtype), heads[:, -num_kv_heads:].to(pool.dtype)), dim=1)
    slots = batch.slots.long().to(pool.device)
    shape = (num_tokens, 2, num_kv_heads, head_dim)
    pool[slots // block_size, layer, :, :, slots % block_size] = key_value.view(shape)
    return query.to(heads.dtype)


def paged_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, batch: PagedBatch, softmax: Softmax
) -> torch.Tensor:
    out, device = torch.empty_like(query), pool.device
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    scale, window, cap, sinks = softmax
    contexts = batch.context_lens.tolist()
    for row, (start, stop) in enumerate(pairwise(batch.query_starts.tolist())):
        end = contexts[row]
        position = torch.arange(end - (stop - start), end, device=device)[:, None]
        first_block = 0
        if window is not None:
            first_block = max(0, end - (stop - start) - window + 1) // block_size
        blocks = batch.block_tables[row, first_block : -(-end // block_size)].long()
        keys = torch.arange(first_block * block_size, end, device=device)
        # [2, Hkv, blocks, B, D]; slots after the last token may be NaN.
        gathered = pool[blocks.to(device), layer].float().permute(1, 2, 0, 3, 4)
        key, value = gathered.flatten(2, 3)[:, :, None, : len(keys)]

        # [Hkv, Hq / Hkv, Q, D]
        heads = query[start:stop].float().view(stop - start, num_kv_heads, -1, head_dim)
        scores = heads.permute(1, 2, 0, 3) @ key.mT * scale
        if cap is not None:
            scores = (scores / cap).tanh() * cap
        seen = keys <= position
        if window is not None:
            seen &= keys > position - window
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            of_heads = sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, of_heads), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(keys)]
        out[start:stop] = (weights @ value).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch_rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    return rms_norm(x.add_(added), weight, eps)


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    linear, cubic, limit, shift = activation
    x, up = gate_up.float().clamp(max=limit).chunk(2, dim=-1)
    steep = x * (linear + cubic * x * x)
    return (x * steep.sigmoid() * (up.clamp(min=-limit) + shift)).to(gate_up.dtype)


def route(
    logits: torch.Tensor, top_k: int, is_normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    shares, experts = logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if is_normalized:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return experts, shares


def expert_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    order = experts.flatten().argsort(stable=True)
    rows = x[order // experts.shape[1]]
    # `tolist` waits for the number of rows of each expert, so a CUDA graph cannot contain this.
    counts = experts.flatten().bincount(minlength=len(down)).tolist()
    made = torch.empty_like(rows)
    start = 0
    for index, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            first, last = (None, None) if biases is None else (it[index] for it in biases)
            gated = gate(linear(rows[part], gate_up[index], first), activation)
            made[part] = linear(gated, down[index], last)
            start += count
    by_token = torch.empty(rows.shape, device=x.device)
    by_token[order] = made.float()
    return (by_token.view(*experts.shape, -1) * shares[:, :, None]).sum(dim=1).to(x.dtype)


def draw(
    logits: torch.Tensor, settings: torch.Tensor | None = None, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """See `kernels.draw`.

    Computed with plain float64 weights.  The other backends use the integer weights that
    `kernels.contract.SAMPLING` specifies, so at a threshold they may draw another token.
    """
    if allowed is not None:
        bits = (allowed[:, :, None] >> torch.arange(32, device=logits.device)) & 1
        missing = max(0, logits.shape[1] - 32 * allowed.shape[1])
        is_allowed = pad(bits.flatten(1), (0, missing))[:, : logits.shape[1]] != 0
        logits = logits.masked_fill(~is_allowed, -math.inf)
    drawn = logits.argmax(dim=-1)
    if settings is not None:
        rows = settings.cpu().numpy().view(SAMPLING)[:, 0]
        for number in np.flatnonzero(rows["temperature"]).tolist():
            drawn[number] = _draw_row(logits[number].double(), rows[number])
    if allowed is not None:
        drawn[~is_allowed.any(dim=1)] = -1
    return drawn


def _draw_row(logits: torch.Tensor, settings: np.void) -> int:
    # Relative to the largest logit, no temperature is small enough to overflow.
    weights = ((logits - logits.max()) / settings["temperature"]).exp()
    if 0 < settings["top_k"] < len(weights):
        weights[weights < weights.topk(int(settings["top_k"])).values[-1]] = 0
    if settings["top_p"] < 1:
        largest = weights.sort(descending=True).values
        short = largest.cumsum(0) < weights.cumsum(0)[-1] * settings["top_p"]
        weights[weights < largest[: int(short.sum()) + 1][-1]] = 0
    weights[weights < settings["min_p"]] = 0
    cumulated = weights.cumsum(0)
    first = torch.searchsorted(cumulated, settings["uniform"] * cumulated[-1:], right=True)
    # Only a row of NaN gets past the end; an id outside the vocabulary would fail the whole batch.
    return min(int(first), len(weights) - 1)


def pack_kv(
    pool: torch.Tensor, block_table: Sequence[int], rectangle: Rectangle, dtype: torch.dtype
) -> torch.Tensor:
    layers, heads, tokens = rectangle
    segment = torch.empty(segment_shape(pool, rectangle), dtype=dtype, device=pool.device)
    source, target = _sliced(pool, segment)
    for index, inside, outside in _pieces(tokens, pool.shape[4]):
        block = source[block_table[index], layers.start : layers.stop, :, heads.start : heads.stop]
        target[:, :, :, outside] = _within(block[:, :, :, inside], dtype)
    return segment


def unpack_kv(
    pool: torch.Tensor, block_table: Sequence[int], rectangle: Rectangle, segment: torch.Tensor
) -> None:
    layers, heads, tokens = rectangle
    target, source = _sliced(pool, segment)
    for index, inside, outside in _pieces(tokens, pool.shape[4]):
        block = target[block_table[index], layers.start : layers.stop, :, heads.start : heads.stop]
        block[:, :, :, inside] = source[:, :, :, outside]


def _sliced(pool: torch.Tensor, segment: torch.Tensor) -> tuple[Any, Any]:
    """Return both arguments in a form to slice: NumPy slices in a tenth of torch's time.

    NumPy has no bfloat16, but bytes are enough where no dtype is converted.
    """
    if pool.dtype != segment.dtype or pool.device.type != "cpu":
        return pool, segment
    return pool.view(torch.uint8).numpy(), segment.view(torch.uint8).numpy()


def _within(values: Any, dtype: torch.dtype) -> Any:
    """Clamp values to be converted to float8_e4m3fn to its largest; return others unchanged.

    Torch up to 2.11 converts larger values to NaN, later releases saturate.
    """
    if dtype is not torch.float8_e4m3fn or not isinstance(values, torch.Tensor):
        return values
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest)


def _pieces(tokens: range, block_size: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield (logical block, slice within the block, slice within the token range)."""
    for index in range(tokens.start // block_size, -(-tokens.stop // block_size)):
        first = index * block_size
        start, stop = max(tokens.start, first), min(tokens.stop, first + block_size)
        inside = slice(start - first, stop - first)
        yield index, inside, slice(start - tokens.start, stop - tokens.start)
