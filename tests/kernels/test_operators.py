"""The reference and attention of the CPU against formulas in float64, on adversarial batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from kernels import SILU, Rectangle, reference
from kernels.contract import Backend
from kernels.cpu import backend as cpu
from tests.kernels.rowwise_scenes import check_all
from tests.kernels.scenes import NUM_LAYERS, TOLERANCE, check, heads_error, scene, sinks_of

BACKENDS = pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])


@BACKENDS
@pytest.mark.parametrize("window", [None, 40, 200])
def test_attention_over_many_tiles(backend: Backend, window: int | None) -> None:
    check(scene([(300, 1), (190, 150), (129, 65)], num_heads=6), window, backend)


@BACKENDS
@pytest.mark.parametrize("block_size", [64, 128])
def test_a_window_that_begins_beyond_the_keys_at_hand(backend: Backend, block_size: int) -> None:
    """Keys are taken from a block's border on, so the last queries see none of the first ones.

    What is cleared for them ends with the keys at hand: beyond lie other rows, and their sums.
    """
    it = scene([(108, 45), (195, 45), (45, 45)], num_heads=12, block_size=block_size)
    for window in (1, 9):
        check(it, window, backend)


@BACKENDS
@settings(max_examples=60)
@given(
    lens=st.lists(
        st.integers(1, 80).flatmap(lambda c: st.tuples(st.just(c), st.integers(1, c))),
        min_size=1,
        max_size=5,
    ),
    block_size=st.sampled_from([8, 16, 32]),
    window=st.none() | st.integers(1, 90),
    cap=st.none() | st.just(3.0),
    has_sinks=st.booleans(),
    heads=st.sampled_from([(2, 1), (2, 2), (6, 2), (9, 3)]),
    head_dim=st.sampled_from([6, 16, 64, 80]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
def test_attention_equals_the_formula(
    backend: Backend,
    lens: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    cap: float | None,
    has_sinks: bool,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    it = scene(
        lens,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=seed,
    )
    check(it, window, backend, cap=cap, sinks=sinks_of(it, seed) if has_sinks else None)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("is_normed", [False, True])
def test_heads_are_normed_rotated_and_appended(dtype: torch.dtype, is_normed: bool) -> None:
    for num_tokens, heads in ((0, (4, 2)), (1, (7, 1)), (21, (9, 3))):
        for head_dim in (8, 64, 200):
            sizes = dtype, head_dim, num_tokens, heads
            assert heads_error(reference, *sizes, is_normed=is_normed) <= 1, sizes


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rows(dtype: torch.dtype) -> None:
    for size in (1, 7, 576):
        check_all(reference, dtype, size)


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.sampled_from([8, 16, 32]), st.sampled_from([8, 16, 32])),
    tokens=st.tuples(st.integers(0, 70), st.integers(1, 70)),
    layers=st.integers(0, 2).flatmap(lambda a: st.tuples(st.just(a), st.integers(a + 1, 3))),
    heads=st.sampled_from([range(2), range(1), range(1, 2)]),
    seed=st.integers(0, 1000),
)
def test_a_rectangle_crosses_between_block_sizes(
    sizes: tuple[int, int],
    tokens: tuple[int, int],
    layers: tuple[int, int],
    heads: range,
    seed: int,
) -> None:
    start, count = tokens
    part, depth = range(start, start + count), range(*layers)
    it = scene([(start + count, 1)], block_size=sizes[0], seed=seed)
    table = it.batch.block_tables[0].tolist()
    segment = reference.pack_kv(it.pool, table, Rectangle(depth, heads, part), it.pool.dtype)
    assert segment.is_contiguous()
    wanted = it.dense[0][depth.start : depth.stop, :, :, part.start : part.stop]
    wanted = wanted[:, :, heads.start : heads.stop]
    assert torch.equal(segment, wanted)

    pool = torch.full((20, NUM_LAYERS, 2, 2, sizes[1], 16), math.nan)
    blocks = torch.randperm(20, generator=torch.Generator().manual_seed(seed)).tolist()
    reference.unpack_kv(pool, blocks, Rectangle(depth, heads, part), segment)
    assert torch.equal(
        reference.pack_kv(pool, blocks, Rectangle(depth, heads, part), pool.dtype), segment
    )
    assert int((~pool.isnan()).sum()) == segment.numel(), "wrote beside the rectangle"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 3])
def test_a_token_is_the_sum_of_its_experts_shares(top_k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(top_k)
    x = torch.randn(40, 24, generator=generator).to(dtype)
    gate_up = (torch.randn(9, 2 * 20, 24, generator=generator) / 5).to(dtype)
    down = (torch.randn(9, 24, 20, generator=generator) / 4).to(dtype)
    logits = torch.randn(40, 9, generator=generator)
    logits[:, 4] = -torch.inf  # an expert that nobody goes to
    experts, shares = reference.route(logits, top_k, is_normalized=True)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(40))
    want = torch.zeros(40, 24, dtype=torch.float64)
    for token in range(40):
        for expert, share in zip(experts[token].tolist(), shares[token].double(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            want[token] += share * (down[expert].double() @ (silu(gate) * up))
    got = reference.expert_mlp(x, experts, shares, gate_up, down, SILU)
    assert got.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_experts_may_have_biases() -> None:
    generator = torch.Generator().manual_seed(4)
    x, gate_up, down, *biases = (
        torch.randn(shape, generator=generator)
        for shape in ((20, 12), (5, 2 * 16, 12), (5, 12, 16), (5, 2 * 16), (5, 12))
    )
    experts, shares = reference.route(
        torch.randn(20, 5, generator=generator), 2, is_normalized=True
    )
    want = torch.zeros(20, 12)
    for token in range(20):
        for expert, share in zip(experts[token].tolist(), shares[token], strict=True):
            gate, up = (gate_up[expert] @ x[token] + biases[0][expert]).chunk(2)
            want[token] += share * (down[expert] @ (silu(gate) * up) + biases[1][expert])
    got = reference.expert_mlp(x, experts, shares, gate_up, down, SILU, (biases[0], biases[1]))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_shares_are_of_all_experts_or_of_the_chosen_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    likely = logits.softmax(dim=1)[0]
    experts, shares = reference.route(logits, 2, is_normalized=False)
    assert experts.tolist() == [[1, 3]]
    torch.testing.assert_close(shares[0], likely[[1, 3]])
    _, shares = reference.route(logits, 2, is_normalized=True)
    torch.testing.assert_close(shares[0], likely[[1, 3]] / likely[[1, 3]].sum())
