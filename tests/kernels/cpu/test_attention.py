"""Attention as an operation: how a step is cut, and tiles that end anywhere.

`test_operators` has the rest.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import PagedBatch, reference
from kernels.cpu import backend as cpu
from kernels.cpu.attention import MAX_ROWS, WorkItems, attend
from kernels.cpu.program import Program
from tests.kernels.scenes import check, scene


def test_an_operation_made_once_follows_its_items() -> None:
    it = scene([(40, 1), (70, 1), (9, 1)])
    query, out = it.query.contiguous(), torch.empty(3, 4, 16)
    items = WorkItems(query.shape[1] // it.pool.shape[3])
    attention = attend(query, it.pool, 1, items, out, scale=0.25, window=None)
    program = Program([items.plan(), attention])
    for lens in ([40, 70, 9], [1, 3, 2], [39, 64, 8]):
        batch = PagedBatch(
            slots=it.batch.slots,
            query_starts=it.batch.query_starts,
            context_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=it.batch.block_tables.clone(),
        )
        items.set(batch)
        program.run()
        want = reference.paged_attention(query, it.pool, 1, batch, 0.25, None)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def cut(batch: PagedBatch, shared: int) -> list[tuple[int, ...]]:
    """Return (sequence, first token, queries, position of the first) of each item."""
    items = WorkItems(shared)
    items.set(batch)
    Program([items.plan()]).run()
    return items.items.tolist()  # type: ignore[no-any-return]


def test_the_longest_item_comes_first() -> None:
    items = cut(scene([(5, 1), (150, 130), (90, 1)]).batch, 2)
    assert items[0] == (1, 1 + 48, 48, 20 + 48)
    whole = [(0, 0, 1, 4), (2, 131, 1, 89)]
    parts = [(1, 1, 48, 20), (1, 49, 48, 68), (1, 97, 34, 116)]
    assert sorted(items) == sorted(whole + parts)
    costs = [(position + count) * count for _, _, count, position in items]
    assert costs == sorted(costs, reverse=True)


@given(
    lens=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 120)), min_size=1, max_size=4),
    shared=st.integers(1, 120),
)
def test_every_query_is_in_one_item(lens: list[tuple[int, int]], shared: int) -> None:
    batch = scene([(past + new, new) for past, new in lens], head_dim=2, num_kv_heads=1).batch
    covered: list[int] = []
    for sequence, token, count, position in cut(batch, shared):
        assert count * shared <= MAX_ROWS or count == 1
        first = int(batch.query_starts[sequence])
        assert position - lens[sequence][0] == token - first
        covered += range(token, token + count)
    assert sorted(covered) == list(range(int(batch.query_starts[-1])))


@pytest.mark.parametrize("block_size", [1, 3, 8, 24, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_of_any_size(block_size: int, dtype: torch.dtype) -> None:
    lens = [(1, 1), (2, 1), (63, 1), (64, 1), (65, 2), (129, 1), (67, 30)]
    it = scene(lens, block_size=block_size, dtype=dtype, backend=cpu)
    for window in (None, 5, 65):
        check(it, window, cpu)


@pytest.mark.parametrize("shared", [1, 2, 3, 4, 5, 7, 11, 12, 13])
@pytest.mark.parametrize("head_dim", [16, 32, 48, 128])
def test_rows_in_groups_of_every_size(shared: int, head_dim: int) -> None:
    lens = [(70, 1), (131, 1)]
    it = scene(lens, num_heads=2 * shared, num_kv_heads=2, head_dim=head_dim, backend=cpu)
    check(it, None, cpu)
