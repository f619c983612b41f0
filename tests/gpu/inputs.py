"""Random inputs and what must come out: paged KV made without the kernels, and the formula.

Blocks are permuted, slots that no token owns are NaN, columns past a sequence's end name a block
that does not exist: who reads what is not his shows it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from kernels import PagedBatch

# What rounding to the dtype may do, as in tests/kernels: a share of a value and of its row's size.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# No kernel keeps that share of what is nearly zero, as where a sink takes all the attention.
# There so much may differ: the smallest normal number, below which a GPU may take 0, and of float16
# a few of the steps of 2^-24 that it makes there.
FLOOR = {
    torch.float32: torch.finfo(torch.float32).tiny,
    torch.bfloat16: torch.finfo(torch.bfloat16).tiny,
    torch.float16: 2.0**-22,
}


class Shape(NamedTuple):
    """The sizes of a pool and of the queries on it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    num_layers: int = 2


class Paged(NamedTuple):
    """A pool, a batch on it, queries [T, Hq, D], and each sequence's KV [L, 2, Hkv, context, D]."""

    pool: torch.Tensor
    batch: PagedBatch
    query: torch.Tensor
    dense: list[torch.Tensor]
    tables: list[list[int]]


def lengths(draw: random.Random, longest: int) -> list[tuple[int, int]]:
    """Draw (context, queries): borders of blocks and tiles, prompts, chunks, one to be split."""
    chunk = draw.randint(2, longest // 4)
    few = [(context, 1) for context in draw.sample([1, 15, 16, 17, 63, 64, 65, 127, 128, 129], 4)]
    some = [
        (longest - draw.randint(0, 40), draw.randint(1, 3)),
        (chunk + draw.randint(1, longest // 4), chunk),
        (prompt := draw.randint(2, longest // 3), prompt),
    ]
    found = few + some
    draw.shuffle(found)
    return found


def paged(
    lens: Sequence[tuple[int, int]], shape: Shape, device: torch.device, draw: random.Random
) -> Paged:
    """Make sequences of (context, queries) in permuted blocks."""
    generator = torch.Generator(device).manual_seed(draw.getrandbits(60))
    size = shape.block_size
    counts = [-(-context // size) for context, _ in lens]
    order = list(range(sum(counts) + 3))
    draw.shuffle(order)
    ends = [sum(counts[:number]) for number in range(len(counts) + 1)]
    tables = [order[start:stop] for start, stop in pairwise(ends)]
    inner = (shape.num_layers, 2, shape.num_kv_heads)
    pool = torch.full(
        (len(order), *inner, size, shape.head_dim), math.nan, dtype=shape.dtype, device=device
    )
    dense = []
    for (context, _), table in zip(lens, tables, strict=True):
        whole = (*inner, len(table) * size, shape.head_dim)
        kv = torch.randn(whole, device=device, generator=generator).to(shape.dtype)
        kv[..., context:, :] = math.nan
        blocks = kv.view(*inner, len(table), size, shape.head_dim).permute(3, 0, 1, 2, 4, 5)
        pool[torch.tensor(table, device=device)] = blocks
        dense.append(kv[..., :context, :])
    num_tokens = sum(queries for _, queries in lens)
    query = torch.randn(
        num_tokens, shape.num_heads, shape.head_dim, device=device, generator=generator
    )
    # One head far from the others: a softmax that forgets to subtract its maximum overflows.
    query[:, 0] *= 30
    return Paged(pool, batch_of(lens, tables, size), query.to(shape.dtype), dense, tables)


def batch_of(
    lens: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], block_size: int
) -> PagedBatch:
    """Return the batch in which each sequence's last tokens are the queries."""
    width = max(map(len, tables)) + 2
    slots = [
        table[position // block_size] * block_size + position % block_size
        for (context, queries), table in zip(lens, tables, strict=True)
        for position in range(context - queries, context)
    ]
    starts = [0]
    for _, queries in lens:
        starts.append(starts[-1] + queries)
    padded = [[*table, *[1 << 24] * (width - len(table))] for table in tables]
    return PagedBatch(
        slots=torch.tensor(slots, dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for context, _ in lens], dtype=torch.int32),
        block_tables=torch.tensor(padded, dtype=torch.int32),
    )


def formula(
    it: Paged,
    layer: int,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention as its formula has it, [T, Hq, D] in float64."""
    out = []
    starts = it.batch.query_starts.tolist()
    for kv, (start, stop) in zip(it.dense, pairwise(starts), strict=True):
        key, value = kv[layer].double()
        group = it.query.shape[1] // key.shape[0]
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        query = it.query[start:stop].double().transpose(0, 1)
        context = key.shape[1]
        position = torch.arange(context - (stop - start), context, device=key.device)[:, None]
        keys = torch.arange(context, device=key.device)
        seen = keys <= position
        if window is not None:
            seen &= keys > position - window
        scores = query @ key.mT * scale
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            beside = sinks.double()[:, None, None].expand(-1, stop - start, 1)
            scores = torch.cat((scores, beside), dim=-1)
        out.append((scores.softmax(-1)[..., :context] @ value).transpose(0, 1))
    return torch.cat(out)


def error(got: torch.Tensor, want: torch.Tensor, tolerance: float, floor: float = 0.0) -> float:
    """Return the largest difference as a share of what is tolerated; NaN counts as infinite.

    The mean of n values is about 1 / sqrt(n): to tolerate so much of 1 would hide, over a long
    context, that keys are missing.  So it is so much of the root mean square of a row, and `floor`.
    """
    size = want.square().mean(-1, keepdim=True).sqrt()
    share = (got.double() - want).abs() / (tolerance * (want.abs() + size) + floor)
    # Where a row is zero, nothing may differ; there 0 / 0 is right.
    share = share.masked_fill(got.double() == want, 0.0)
    return float(share.nan_to_num(nan=math.inf, posinf=math.inf).max())
