"""Every backend of the CPU against dense attention in float64, over adversarial batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.contract import Backend
from kernels.cpu import backend as cpu
from tests.kernels.scenes import NUM_LAYERS, TOLERANCE, check, scene

pytestmark = pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 1000])
def test_attention_equals_the_formula_at_block_borders(
    backend: Backend, block_size: int, window: int | None
) -> None:
    lens = [(1, 1), (7, 7), (8, 1), (9, 3), (16, 16), (17, 1), (31, 2), (32, 32), (33, 1), (70, 5)]
    check(scene(lens, block_size=block_size, backend=backend), window, backend)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (9, 3), (4, 1), (1, 1)])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_shares_kv_heads(
    backend: Backend, num_heads: int, num_kv_heads: int, window: int | None
) -> None:
    lens = [(20, 1), (35, 1), (12, 12), (40, 9)]
    check(scene(lens, num_heads=num_heads, num_kv_heads=num_kv_heads), window, backend)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head_dim", [6, 16, 64, 80])
def test_attention_in_every_dtype(backend: Backend, dtype: torch.dtype, head_dim: int) -> None:
    check(scene([(33, 1), (40, 40), (5, 1)], head_dim=head_dim, dtype=dtype), None, backend)


@pytest.mark.parametrize("window", [None, 40, 200])
def test_attention_over_many_tiles(backend: Backend, window: int | None) -> None:
    check(scene([(300, 1), (190, 150), (129, 65)], num_heads=6), window, backend)


@pytest.mark.parametrize("block_size", [64, 128])
def test_a_window_that_begins_beyond_the_keys_at_hand(backend: Backend, block_size: int) -> None:
    """Keys are taken from a block's border on, so the last queries see none of the first ones.

    What is cleared for them ends with the keys at hand: beyond lie other rows, and their sums.
    """
    it = scene([(108, 45), (195, 45), (45, 45)], num_heads=12, block_size=block_size)
    for window in (1, 9):
        check(it, window, backend)


@settings(max_examples=40)
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
    backend: Backend,
    lens: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    heads: tuple[int, int],
    seed: int,
) -> None:
    num_heads, num_kv_heads = heads
    it = scene(
        lens, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size, seed=seed
    )
    check(it, window, backend)


def test_append_writes_its_slots_and_no_other(backend: Backend) -> None:
    it = scene([(13, 4), (5, 5)], block_size=8, backend=backend)
    written = ~it.pool.isnan()
    assert int(written.sum()) == sum(kv.numel() for kv in it.dense)


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.sampled_from([8, 16, 32]), st.sampled_from([8, 16, 32])),
    tokens=st.tuples(st.integers(0, 70), st.integers(1, 70)),
    layers=st.integers(0, 2).flatmap(lambda a: st.tuples(st.just(a), st.integers(a + 1, 3))),
    seed=st.integers(0, 1000),
)
def test_a_rectangle_crosses_between_block_sizes(
    backend: Backend,
    sizes: tuple[int, int],
    tokens: tuple[int, int],
    layers: tuple[int, int],
    seed: int,
) -> None:
    start, count = tokens
    part, depth = range(start, start + count), range(*layers)
    it = scene([(start + count, 1)], block_size=sizes[0], seed=seed)
    table = it.batch.block_tables[0].tolist()
    segment = backend.pack_kv(it.pool, table, depth, part, it.pool.dtype)
    assert segment.is_contiguous()
    wanted = it.dense[0][depth.start : depth.stop, :, :, part.start : part.stop]
    assert torch.equal(segment, wanted)

    pool = torch.full((20, NUM_LAYERS, 2, 2, sizes[1], 16), math.nan)
    blocks = torch.randperm(20, generator=torch.Generator().manual_seed(seed)).tolist()
    backend.unpack_kv(pool, blocks, depth, part, segment)
    assert torch.equal(backend.pack_kv(pool, blocks, depth, part, pool.dtype), segment)
    assert int((~pool.isnan()).sum()) == segment.numel(), "wrote beside the rectangle"


@pytest.mark.parametrize("held", list(TOLERANCE))
@pytest.mark.parametrize("sent", list(TOLERANCE))
def test_packing_and_unpacking_convert(
    backend: Backend, held: torch.dtype, sent: torch.dtype
) -> None:
    it = scene([(21, 1)], dtype=held)
    table = it.batch.block_tables[0].tolist()
    segment = backend.pack_kv(it.pool, table, range(NUM_LAYERS), range(3, 21), sent)
    assert segment.dtype == sent
    assert torch.equal(segment, it.dense[0][:, :, :, 3:].to(sent))
    pool = torch.zeros(4, NUM_LAYERS, 2, 2, 8, 16, dtype=held)
    backend.unpack_kv(pool, [3, 0, 2], range(NUM_LAYERS), range(3, 21), segment)
    back = backend.pack_kv(pool, [3, 0, 2], range(NUM_LAYERS), range(3, 21), held)
    assert torch.equal(back, segment.to(held))
