"""The reference against dense attention in float64, over adversarial batches."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import PagedBatch, reference

HEAD_DIM, NUM_LAYERS = 6, 3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


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
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Scene:
    """Sequences of (context, queries) in permuted blocks; every other slot of the pool is NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-context // block_size) for context, _ in lens) + 3
    shape = (num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, HEAD_DIM)
    pool = torch.full(shape, math.nan, dtype=dtype)
    blocks = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = [[next(blocks) for _ in range(-(-context // block_size))] for context, _ in lens]
    dense = [
        torch.randn(NUM_LAYERS, 2, num_kv_heads, context, HEAD_DIM, generator=generator).to(dtype)
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
            kernels.append_kv(pool, layer, torch.cat(values), last)
    assert last is not None
    num_tokens = sum(queries for _, queries in lens)
    query = torch.randn(num_tokens, num_heads, HEAD_DIM, generator=generator).to(dtype)
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


def check(it: Scene, window: int | None) -> None:
    scale = HEAD_DIM**-0.5
    tolerance = TOLERANCE[it.pool.dtype]
    for layer in (0, NUM_LAYERS - 1):
        got = kernels.paged_attention(
            it.query, it.pool, layer, it.batch, scale=scale, window=window
        )
        assert got.dtype == it.query.dtype and got.shape == it.query.shape
        want = dense_attention(it, layer, scale, window)
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 1000])
def test_attention_equals_the_formula_at_block_borders(block_size: int, window: int | None) -> None:
    lens = [(1, 1), (7, 7), (8, 1), (9, 3), (16, 16), (17, 1), (31, 2), (32, 32), (33, 1), (70, 5)]
    check(scene(lens, block_size=block_size), window)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (9, 3), (4, 1), (1, 1)])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_shares_kv_heads(num_heads: int, num_kv_heads: int, window: int | None) -> None:
    lens = [(20, 1), (35, 1), (12, 12), (40, 9)]
    check(scene(lens, num_heads=num_heads, num_kv_heads=num_kv_heads), window)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_attention_in_every_dtype(dtype: torch.dtype) -> None:
    check(scene([(33, 1), (40, 40), (5, 1)], dtype=dtype), None)


def test_decode_of_many_is_one_group() -> None:
    it = scene([(200, 1), (150, 1), (255, 1)])
    check(it, None)
    assert len(it.batch.scratch["groups", None]) == 1


def test_a_group_never_gathers_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_GROUP_VALUES", 4 * 64 * HEAD_DIM * 2)
    it = scene([(40, 1)] * 5 + [(50, 4)])
    check(it, None)
    assert [group.shape[0] for group in it.batch.scratch["groups", None]] == [2, 2, 1, 1]


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(
        st.integers(1, 80).flatmap(lambda c: st.tuples(st.just(c), st.integers(1, c))),
        min_size=1,
        max_size=5,
    ),
    block_size=st.sampled_from([8, 16, 32]),
    window=st.none() | st.integers(1, 90),
    heads=st.sampled_from([(2, 1), (2, 2), (6, 2)]),
    seed=st.integers(0, 1000),
)
def test_attention_equals_the_formula(
    lens: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    heads: tuple[int, int],
    seed: int,
) -> None:
    num_heads, num_kv_heads = heads
    check(
        scene(
            lens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            seed=seed,
        ),
        window,
    )


def test_append_writes_its_slots_and_no_other() -> None:
    it = scene([(13, 4), (5, 5)], block_size=8)
    written = ~it.pool.isnan()
    assert int(written.sum()) == sum(kv.numel() for kv in it.dense)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.sampled_from([8, 16, 32]), st.sampled_from([8, 16, 32])),
    tokens=st.tuples(st.integers(0, 70), st.integers(1, 70)),
    layers=st.integers(0, 2).flatmap(lambda a: st.tuples(st.just(a), st.integers(a + 1, 3))),
    seed=st.integers(0, 1000),
)
def test_a_rectangle_crosses_between_block_sizes(
    sizes: tuple[int, int], tokens: tuple[int, int], layers: tuple[int, int], seed: int
) -> None:
    start, count = tokens
    part, depth = range(start, start + count), range(*layers)
    it = scene([(start + count, 1)], block_size=sizes[0], seed=seed)
    table = it.batch.block_tables[0].tolist()
    segment = kernels.pack_kv(it.pool, table, depth, part)
    assert segment.is_contiguous()
    wanted = it.dense[0][depth.start : depth.stop, :, :, part.start : part.stop]
    assert torch.equal(segment, wanted)

    pool = torch.full((20, NUM_LAYERS, 2, 2, sizes[1], HEAD_DIM), math.nan)
    blocks = torch.randperm(20, generator=torch.Generator().manual_seed(seed)).tolist()
    kernels.unpack_kv(pool, blocks, depth, part, segment)
    assert torch.equal(kernels.pack_kv(pool, blocks, depth, part), segment)
    assert int((~pool.isnan()).sum()) == segment.numel(), "wrote beside the rectangle"


@pytest.mark.parametrize("held", list(TOLERANCE))
@pytest.mark.parametrize("sent", list(TOLERANCE))
def test_packing_and_unpacking_convert(held: torch.dtype, sent: torch.dtype) -> None:
    it = scene([(21, 1)], dtype=held)
    table = it.batch.block_tables[0].tolist()
    segment = kernels.pack_kv(it.pool, table, range(NUM_LAYERS), range(3, 21), sent)
    assert segment.dtype == sent
    assert torch.equal(segment, it.dense[0][:, :, :, 3:].to(sent))
    pool = torch.zeros(4, NUM_LAYERS, 2, 2, 8, HEAD_DIM, dtype=held)
    kernels.unpack_kv(pool, [3, 0, 2], range(NUM_LAYERS), range(3, 21), segment)
    back = kernels.pack_kv(pool, [3, 0, 2], range(NUM_LAYERS), range(3, 21))
    assert torch.equal(back, segment.to(held))
