"""Attention as an operation: it reads what its units say; `test_operators` has the rest."""

from __future__ import annotations

import torch

from kernels import PagedBatch, reference
from kernels.cpu.attention import attend
from kernels.cpu.program import Program
from kernels.cpu.units import Units
from tests.kernels.scenes import scene


def test_an_operation_made_once_follows_its_units() -> None:
    it = scene([(40, 1), (70, 1), (9, 1)])
    query, out = it.query.contiguous(), torch.empty(3, 4, 16)
    units = Units(query.shape[1] // it.pool.shape[3])
    attention = attend(query, it.pool, 1, units, out, scale=0.25, window=None)
    program = Program([units.cut(), attention])
    for lens in ([40, 70, 9], [1, 3, 2], [39, 64, 8]):
        batch = PagedBatch(
            slots=it.batch.slots,
            query_starts=it.batch.query_starts,
            context_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=it.batch.block_tables.clone(),
        )
        units.set(batch)
        program.run()
        want = reference.paged_attention(query, it.pool, 1, batch, 0.25, None)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
