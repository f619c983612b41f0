"""Adversarial batches for the operators: a pool full of NaN, permuted blocks, and the formula."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from kernels import PagedBatch, contract, reference
from kernels.contract import Backend

NUM_LAYERS = 3
# A score of the loud head below is up to about 100 and float32 keeps 1e-5 of that, which its
# exponential turns into as large a share of a weight.  A wrong key or mask is an error of about 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Scene(NamedTuple):
    """A pool filled by append_kv, the batch of its last step, and the same KV as dense arrays."""

    pool: torch.Tensor
    batch: PagedBatch
    query: torch.Tensor
    dense: list[torch.Tensor]  # for each sequence [L, 2, Hkv, context, D], as the pool's dtype


def scene(
    lens: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    backend: Backend = reference,
) -> Scene:
    """Sequences of (context, queries) in permuted blocks; every other slot of the pool is NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-context // block_size) for context, _ in lens) + 3
    shape = (num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim)
    pool = torch.full(shape, math.nan, dtype=dtype)
    blocks = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = [[next(blocks) for _ in range(-(-context // block_size))] for context, _ in lens]
    dense = [
        torch.randn(NUM_LAYERS, 2, num_kv_heads, context, head_dim, generator=generator).to(dtype)
        for context, _ in lens
    ]
    width = max(map(len, tables)) + 2
    padded = np.full((len(lens), width), num_blocks + 7, np.int32)  # out of range: never read
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    last = None
    for step in ("past", "present"):
        # The past is appended token ranges at a time, the present is what the queries belong to.
        ranges = [
            range(0, context - queries) if step == "past" else range(context - queries, context)
            for context, queries in lens
        ]
        last = PagedBatch(
            slots=torch.tensor(
                [
                    table[p // block_size] * block_size + p % block_size
                    for table, part in zip(tables, ranges, strict=True)
                    for p in part
                ],
                dtype=torch.int32,
            ),
            query_starts=torch.tensor(
                np.cumsum([0, *(len(part) for part in ranges)]), dtype=torch.int32
            ),
            context_lens=torch.tensor([context for context, _ in lens], dtype=torch.int32),
            block_tables=torch.from_numpy(padded),
        )
        for layer in range(NUM_LAYERS):
            values = [
                kv[layer][:, :, part.start : part.stop].permute(2, 0, 1, 3)
                for kv, part in zip(dense, ranges, strict=True)
            ]
            backend.append_kv(pool, layer, torch.cat(values), last)
    assert last is not None
    num_tokens = sum(queries for _, queries in lens)
    query = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
    # One head far from the others: a softmax that forgets to subtract its maximum overflows.
    query[:, 0] *= 30
    return Scene(pool, last, query, dense)


def dense_attention(it: Scene, layer: int, scale: float, window: int | None) -> torch.Tensor:
    """Attention as its formula has it, one query at a time, in float64."""
    out = torch.empty(it.query.shape, dtype=torch.float64)
    starts = it.batch.query_starts.tolist()
    for kv, (start, stop) in zip(it.dense, pairwise(starts), strict=True):
        context = kv.shape[3]
        for token in range(start, stop):
            position = context - stop + token
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(it.query.shape[1]):
                shared = head * kv.shape[2] // it.query.shape[1]
                key, value = kv[layer, :, shared, first : position + 1].double()
                weights = (key @ it.query[token, head].double() * scale).softmax(0)
                out[token, head] = weights @ value
    return out


def check(it: Scene, window: int | None, backend: Backend = reference) -> None:
    scale = it.query.shape[2] ** -0.5
    # The rounding of a score grows with the number of its products.
    tolerance = TOLERANCE[it.pool.dtype] * max(1.0, it.query.shape[2] / 64)
    for layer in (0, NUM_LAYERS - 1):
        contract.check_attention(it.query, it.pool, layer, it.batch, window)
        got = backend.paged_attention(it.query, it.pool, layer, it.batch, scale, window)
        assert got.dtype == it.query.dtype and got.shape == it.query.shape
        want = dense_attention(it, layer, scale, window)
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
