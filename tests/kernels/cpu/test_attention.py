"""Attention as an operation: blocks of any size, rows in groups of any, tiles that end anywhere.

`test_operators` has the rest.
"""

from __future__ import annotations

import pytest
import torch

from kernels import PagedBatch, Softmax, reference
from kernels.cpu import backend as cpu
from kernels.cpu.attention import attend
from kernels.cpu.program import Program
from kernels.cpu.work_items import WorkItems
from tests.kernels.scenes import check, scene


def test_an_operation_made_once_follows_its_items() -> None:
    it = scene([(40, 1), (70, 1), (9, 1)])
    query, out = it.query.contiguous(), torch.empty(3, 4, 16)
    items = WorkItems(query.shape[1] // it.pool.shape[3])
    attention = attend(query, it.pool, 1, items, out, Softmax(0.25))
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
        want = reference.paged_attention(query, it.pool, 1, batch, Softmax(0.25))
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 3, 8, 24, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_of_any_size(block_size: int, dtype: torch.dtype) -> None:
    lens = [(1, 1), (2, 1), (63, 1), (64, 1), (65, 2), (129, 1), (67, 30)]
    it = scene(lens, block_size=block_size, dtype=dtype)
    for window in (None, 5, 65):
        check(it, window, cpu)


@pytest.mark.parametrize("shared", [1, 2, 3, 4, 5, 7, 11, 12, 13])
@pytest.mark.parametrize("head_dim", [16, 32, 48, 128])
def test_rows_in_groups_of_every_size(shared: int, head_dim: int) -> None:
    lens = [(70, 1), (131, 1)]
    it = scene(lens, num_heads=2 * shared, num_kv_heads=2, head_dim=head_dim)
    check(it, None, cpu)
