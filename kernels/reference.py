"""The operators in plain torch on any device, against which the other backends are tested.

Strategy of attention: sequences of similar length are gathered out of their blocks, whole blocks at
a time, into one padded tensor.  Slots past a sequence's end may hold NaN, so they are zeroed in the
gathered copy besides being masked.  Row numbers and masks depend on the step, not on the layer:
they are planned once a step and kept in the batch.  16-bit values are widened: sums are float32.
What each operator computes, and of what, `kernels` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.nn.functional import rms_norm as torch_rms_norm

from kernels.contract import SAMPLING, Activation, PagedBatch

Ints = npt.NDArray[np.int64]

# Contexts up to this long may share a padded group, whatever their lengths.
MIN_GROUP_KEYS = 64
# Keys and values gathered at once, 64 MiB of float32; bounds the memory of a step.
MAX_GROUP_VALUES = 1 << 24
# Sorting a large vocabulary is slow; so many of the likeliest tokens nearly always hold the top_p.
_CANDIDATES = 256
LARGE_VOCABULARY = 8192


class Group(NamedTuple):
    """S' sequences attended to as one padded batch of Q queries and C keys each.

    Attributes:
        queries: [S' * Q] token of each query, padding repeats a sequence's last; None: 0, 1, 2...
        kept: [tokens of the group] which of the S' * Q results are not padding; None: all.
        blocks: [2 * S' * Hkv * M'] rows of the pool seen as [rows, B * D], of layer 0.
        unused: rows of the gathered [2 * S' * Hkv * M' * B, D] without a token; None: none.
        mask: [S', 1, Q, C] float32 addend, 0 or -inf; None: every query sees every key.
        shape: (S', Q, C).
    """

    queries: torch.Tensor | None
    kept: torch.Tensor | None
    blocks: torch.Tensor
    unused: torch.Tensor | None
    mask: torch.Tensor | None
    shape: tuple[int, int, int]


class Softmax(NamedTuple):
    """Turns scores into weights; see `kernels.paged_attention`."""

    scale: float
    cap: float | None
    sinks: torch.Tensor | None


@dataclass(slots=True)
class StepPlan:
    """Values derived from a batch once: pool rows of its slots in layer 0, groups by window."""

    rows: torch.Tensor | None = None
    groups: dict[int | None, list[Group]] = field(default_factory=dict)
    max_group_values: int = MAX_GROUP_VALUES


def check_pool(pool: torch.Tensor) -> None:
    """Torch takes pools of any size."""


def rotate_and_append(
    heads: torch.Tensor,
    rotation: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    turned = heads[:, :-num_kv_heads].float()
    if norm is not None:
        turned = torch_rms_norm(turned, (head_dim,), None, eps) * norm
    cos, sin = rotation[:, None].unbind(2)
    x, y = turned.chunk(2, dim=-1)
    turned = torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1)
    query, key = turned.tensor_split((-num_kv_heads,), dim=1)
    key_value = torch.cat((key.to(pool.dtype), heads[:, -num_kv_heads:].to(pool.dtype)), dim=1)
    plan = batch.scratch.of(StepPlan)
    if plan.rows is None:
        slots = batch.slots.numpy().astype(np.int64)
        block_rows = num_layers * 2 * num_kv_heads * block_size
        first = slots // block_size * block_rows + slots % block_size
        by_head = first[:, None] + np.arange(2 * num_kv_heads) * block_size
        plan.rows = torch.from_numpy(by_head.ravel()).to(pool.device)
    # One layer is 2 * Hkv * B rows: shift the view, not the rows.
    layer_rows = pool.view(-1, head_dim)[layer * 2 * num_kv_heads * block_size :]
    layer_rows.index_copy_(0, plan.rows, key_value.view(-1, head_dim))
    return query.to(heads.dtype)


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    softmax = Softmax(scale, cap, sinks)
    plans = batch.scratch.of(StepPlan).groups
    if window not in plans:
        plans[window] = _plan(batch, pool, window)
    groups = plans[window]
    if len(groups) == 1 and groups[0].queries is None:
        return _attend(query, pool, layer, groups[0], softmax)
    out = torch.empty_like(query)
    for group in groups:
        tokens = group.queries
        assert tokens is not None, "one of several groups is not the whole batch"
        attended = _attend(query[tokens], pool, layer, group, softmax)
        if group.kept is not None:
            attended, tokens = attended[group.kept], tokens[group.kept]
        out[tokens] = attended
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
    # How many rows each expert has is waited for: on a GPU this cannot be part of a graph.
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
    logits: torch.Tensor,
    settings: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.draw`; in float64, not in the order of `kernels.contract.SAMPLING`."""
    is_allowed = None if allowed is None else _bits(allowed, logits)
    if is_allowed is not None:
        logits = logits.masked_fill(~is_allowed, -torch.inf)
    chosen = logits.argmax(dim=-1)
    if settings is not None:
        rows = settings.cpu().numpy().view(SAMPLING)[:, 0]
        is_greedy = torch.from_numpy(rows["temperature"] == 0).to(logits.device)
        chosen = torch.where(is_greedy, chosen, _drawn(logits, rows))
    if is_allowed is not None:
        chosen[~is_allowed.any(dim=1)] = -1
    return chosen


def _drawn(logits: torch.Tensor, settings: npt.NDArray[np.void]) -> torch.Tensor:
    temperature, min_p, uniform = (
        torch.tensor(settings[name], device=logits.device)[:, None]
        for name in ("temperature", "min_p", "uniform")
    )
    # Relative to the largest, no temperature is small enough to overflow.
    relative = logits.double()
    relative = relative - relative.amax(dim=-1, keepdim=True)
    weights = (relative / temperature).exp_()
    _keep_top_k(weights, settings["top_k"].tolist())
    _keep_top_p(weights, settings["top_p"].tolist())
    if settings["min_p"].any():
        weights.masked_fill_(weights < min_p, 0.0)
    cumulated = weights.cumsum(dim=-1)
    first = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)[:, 0]
    # Only a row of NaN gets past the end; an id the vocabulary lacks would fail the whole batch.
    return first.clamp_(max=logits.shape[1] - 1)


def _bits(allowed: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return [R, V] whether each token is allowed."""
    bits = (allowed[:, :, None] >> torch.arange(32, device=logits.device)) & 1
    missing = max(0, logits.shape[1] - bits[0].numel())
    return torch.nn.functional.pad(bits.flatten(1), (0, missing))[:, : logits.shape[1]] != 0


def pack_kv(
    pool: torch.Tensor,
    block_table: Sequence[int],
    layers: range,
    tokens: range,
    dtype: torch.dtype,
    heads: range,
) -> torch.Tensor:
    shape = (len(layers), 2, len(heads), len(tokens), pool.shape[5])
    segment = torch.empty(shape, dtype=dtype, device=pool.device)
    source, target = _sliced(pool, segment)
    for index, inside, outside in _pieces(tokens, pool.shape[4]):
        block = source[block_table[index], layers.start : layers.stop, :, heads.start : heads.stop]
        target[:, :, :, outside] = _within(block[:, :, :, inside], dtype)
    return segment


def unpack_kv(
    pool: torch.Tensor,
    block_table: Sequence[int],
    layers: range,
    tokens: range,
    segment: torch.Tensor,
    heads: range,
) -> None:
    target, source = _sliced(pool, segment)
    for index, inside, outside in _pieces(tokens, pool.shape[4]):
        block = target[block_table[index], layers.start : layers.stop, :, heads.start : heads.stop]
        block[:, :, :, inside] = source[:, :, :, outside]


def _sliced(pool: torch.Tensor, segment: torch.Tensor) -> tuple[Any, Any]:
    """Return both as something to slice: NumPy does it in a tenth of torch's time.

    It has no bfloat16, but where nothing is converted the bytes will do.
    """
    if pool.dtype != segment.dtype or pool.device.type != "cpu":
        return pool, segment
    return pool.view(torch.uint8).numpy(), segment.view(torch.uint8).numpy()


def _within(values: Any, dtype: torch.dtype) -> Any:
    """Return values as they are converted to `dtype`: what fp8 has no room for is its largest.

    Torch up to 2.11 makes NaN of it, later releases saturate.
    """
    if dtype is not torch.float8_e4m3fn or not isinstance(values, torch.Tensor):
        return values
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest)


def _pieces(tokens: range, block_size: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield (logical block, its part inside the block, its part of the token range)."""
    for index in range(tokens.start // block_size, -(-tokens.stop // block_size)):
        first = index * block_size
        start, stop = max(tokens.start, first), min(tokens.stop, first + block_size)
        inside = slice(start - first, stop - first)
        yield index, inside, slice(start - tokens.start, stop - tokens.start)


def _attend(
    query: torch.Tensor, pool: torch.Tensor, layer: int, group: Group, softmax: Softmax
) -> torch.Tensor:
    """Attend for [S' * Q, Hq, D] queries of one group; the same shape comes back."""
    num_sequences, num_queries, num_keys = group.shape
    _, _, _, num_kv_heads, block_size, head_dim = pool.shape
    layer_blocks = pool.view(-1, block_size * head_dim)[layer * 2 * num_kv_heads :]
    gathered = layer_blocks.index_select(0, group.blocks).float()
    if group.unused is not None:
        gathered.view(-1, head_dim).index_fill_(0, group.unused, 0.0)
    keys, values = gathered.view(2, num_sequences, num_kv_heads, -1, head_dim)[
        :, :, :, :num_keys
    ].unbind()
    heads = query.view(num_sequences, num_queries, -1, head_dim).float().transpose(1, 2)
    if softmax.cap is not None or softmax.sinks is not None:
        attended = _attend_in_steps(heads, keys, values, group.mask, softmax)
        return attended.transpose(1, 2).reshape(query.shape).to(query.dtype)
    if num_queries == 1:
        # Query heads that share a KV head become its queries: fewer, larger products.
        heads = heads.reshape(num_sequences, num_kv_heads, -1, head_dim)
    attended = scaled_dot_product_attention(
        heads, keys, values, attn_mask=group.mask, scale=softmax.scale, enable_gqa=num_queries > 1
    )
    if num_queries > 1:
        attended = attended.transpose(1, 2)
    return attended.reshape(query.shape).to(query.dtype)


def _attend_in_steps(
    heads: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    softmax: Softmax,
) -> torch.Tensor:
    """Attend as the formula reads, for [S', Hq, Q, D] heads and [S', Hkv, C, D] keys."""
    num_sequences, num_heads, num_queries, head_dim = heads.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    # Heads that share a KV head become its queries: keys are not repeated.
    rows = heads.reshape(num_sequences, num_kv_heads, -1, head_dim)
    scores = (rows @ keys.transpose(2, 3) * softmax.scale).view(*heads.shape[:3], num_keys)
    if softmax.cap is not None:
        scores = (scores / softmax.cap).tanh() * softmax.cap
    if mask is not None:
        scores = scores + mask
    if softmax.sinks is not None:
        beside = softmax.sinks[:, None, None].expand(*heads.shape[:3], 1)
        scores = torch.cat((scores, beside), dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys]
    attended = weights.reshape(num_sequences, num_kv_heads, -1, num_keys) @ values
    return attended.view(num_sequences, num_heads, num_queries, head_dim)


class _Sequences(NamedTuple):
    """[S'] each; `token` is the first in the batch, `first_query` and `end` are positions."""

    row: Ints
    token: Ints
    num_queries: Ints
    first_query: Ints
    first_block: Ints
    end: Ints


def _plan(batch: PagedBatch, pool: torch.Tensor, window: int | None) -> list[Group]:
    """Split the batch into groups that pad well, see `Group`."""
    _, _, _, num_kv_heads, block_size, head_dim = pool.shape
    max_values = batch.scratch.of(StepPlan).max_group_values
    starts = batch.query_starts.numpy().astype(np.int64)
    end = batch.context_lens.numpy().astype(np.int64)
    num_queries = np.diff(starts)
    first_query = end - num_queries
    first_key = np.maximum(first_query - window + 1, 0) if window else np.zeros_like(end)
    part = _Sequences(
        np.arange(len(end)), starts[:-1], num_queries, first_query, first_key // block_size, end
    )
    num_keys = np.maximum(end - first_key, MIN_GROUP_KEYS)
    # Within a factor of two both ways, so that at most about three quarters are padding.
    sizes = np.frexp(num_keys - 1)[1] * 64 + np.frexp(num_queries - 1)[1]
    groups = []
    for size in np.unique(sizes):
        alike = np.flatnonzero(sizes == size)
        key_values = int(num_keys[alike].max()) * 2 * num_kv_heads * head_dim
        step = max(1, max_values // key_values)
        for first in range(0, len(alike), step):
            chosen = alike[first : first + step]
            members = _Sequences(*(array[chosen] for array in part))
            groups.append(_group(members, batch, pool, window))
    return groups


def _group(part: _Sequences, batch: PagedBatch, pool: torch.Tensor, window: int | None) -> Group:
    _, num_layers, _, num_kv_heads, block_size, _ = pool.shape
    num_queries = int(part.num_queries.max())
    first_key = part.first_block * block_size
    num_keys = int((part.end - first_key).max())

    # [2, S', Hkv, M']: a block is L * 2 * Hkv rows; padding repeats a sequence's last block.
    columns = part.first_block[:, None] + np.arange(-(-num_keys // block_size))
    columns = np.minimum(columns, (part.end[:, None] - 1) // block_size)
    tables = batch.block_tables.numpy()[part.row[:, None], columns].astype(np.int64)
    kinds = np.arange(2)[:, None, None, None] * num_kv_heads
    heads = np.arange(num_kv_heads)[:, None]
    blocks = tables[:, None] * (num_layers * 2 * num_kv_heads) + heads + kinds

    offset = np.minimum(np.arange(num_queries), part.num_queries[:, None] - 1)
    query = part.first_query[:, None] + offset
    key = first_key[:, None] + np.arange(num_keys)
    seen = key[:, None, :] <= query[:, :, None]
    if window is not None:
        seen &= key[:, None, :] > query[:, :, None] - window

    def upload(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(pool.device)

    is_padded = bool((part.num_queries != num_queries).any())
    is_whole = not is_padded and len(tables) == batch.context_lens.shape[0]
    kept = np.flatnonzero(np.arange(num_queries) < part.num_queries[:, None])
    mask = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
    unused = _unused(key, part.end, num_kv_heads, blocks.shape[-1] * block_size)
    return Group(
        queries=None if is_whole else upload((part.token[:, None] + offset).ravel()),
        kept=upload(kept) if is_padded else None,
        blocks=upload(blocks.ravel()),
        unused=upload(unused) if len(unused) else None,
        mask=None if seen.all() else upload(mask),
        shape=(len(tables), num_queries, num_keys),
    )


def _unused(key: Ints, end: Ints, num_kv_heads: int, num_gathered: int) -> Ints:
    """Return the rows of [2, S', Hkv, num_gathered] whose key, of [S', C], is past the end."""
    sequence, column = np.nonzero(key >= end[:, None])
    first = (sequence[:, None] * num_kv_heads + np.arange(num_kv_heads)) * num_gathered
    rows: Ints = (first + column[:, None]).ravel()
    return np.concatenate((rows, rows + len(end) * num_kv_heads * num_gathered))


def _keep_top_k(weights: torch.Tensor, limits: list[int]) -> None:
    """Zero what is under the k-th largest of its row, for rows with a k."""
    rows = [row for row, limit in enumerate(limits) if 0 < limit < weights.shape[1]]
    if not rows:
        return
    chosen = torch.tensor([limits[row] for row in rows], device=weights.device)
    part = weights[rows]
    largest = part.topk(int(chosen.max())).values
    weights[rows] = part.masked_fill_(part < largest.gather(1, chosen[:, None] - 1), 0.0)


def _keep_top_p(weights: torch.Tensor, shares: list[float]) -> None:
    """Zero the weights outside the likeliest tokens that reach top_p, in rows with top_p."""
    rows = [row for row, share in enumerate(shares) if share < 1.0]
    if not rows:
        return
    part = weights[rows]
    share = torch.tensor([shares[row] for row in rows], dtype=weights.dtype, device=weights.device)
    # A cumulated sum adds each row in order; a plain sum's rounding depends on the batch's shape.
    wanted = part.cumsum(dim=-1)[:, -1:] * share[:, None]
    if part.shape[1] > LARGE_VOCABULARY:
        candidates = part.topk(_CANDIDATES).values
        border = _border(candidates, wanted)
        is_short = (candidates.cumsum(dim=-1)[:, -1:] < wanted)[:, 0]
        # Flat rows only: one of them does not make the others' whole vocabulary be sorted.
        if flat := is_short.nonzero()[:, 0].tolist():
            border[flat] = _border(descending(part[flat]), wanted[flat])
    else:
        border = _border(descending(part), wanted)
    weights[rows] = part.masked_fill_(part < border, 0.0)


def _border(largest: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return [R, 1] the weight with which the [R, N] largest, descending, reach the [R, 1] wanted.

    The last of them where they do not.
    """
    last = (largest.cumsum(dim=-1) < wanted).sum(dim=-1, keepdim=True)
    return largest.gather(1, last.clamp_(max=largest.shape[1] - 1))


def descending(values: torch.Tensor) -> torch.Tensor:
    return values.sort(dim=-1, descending=True).values
