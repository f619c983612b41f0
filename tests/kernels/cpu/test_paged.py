"""Keys and values in the pool: every position once, in the block that the table names."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from kernels.cpu import paged
from kernels.cpu.paged import AttentionArguments
from kernels.cpu.simd import BFLOAT16, FLOAT32
from kernels.cpu.tasks import record_of, records_at

arguments_at = records_at(AttentionArguments)
HEAD_DIM, NUM_KV_HEADS = 16, 2


@njit
def run(address, *rest):  # type: ignore[no-untyped-def]
    return paged.run_of_rows(arguments_at(address), *rest)


@pytest.mark.parametrize("element", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("block_size", [1, 7, 16, 100])
def test_runs_are_the_positions_in_their_blocks(block_size: int, element: int) -> None:
    row_bytes = HEAD_DIM * (4 if element == FLOAT32 else 2)
    head_bytes = block_size * row_bytes
    block_bytes = 2 * NUM_KV_HEADS * head_bytes
    end = 150
    table = np.random.default_rng(3).permutation(-(-end // block_size)).astype(np.int32)
    # Real memory: what comes later is asked for early.
    pool = np.zeros(len(table) * block_bytes, np.uint8)
    fields = dict.fromkeys(AttentionArguments._fields, 0) | {
        "head_dim": HEAD_DIM,
        "num_kv_heads": NUM_KV_HEADS,
        "pool": pool.ctypes.data,
        "element": element,
        "head_bytes": head_bytes,
        "block_bytes": block_bytes,
        "block_size": block_size,
    }
    record = record_of(AttentionArguments(**fields))
    for head in range(2 * NUM_KV_HEADS):
        position = 0
        while position < end:
            at, length = run(record.ctypes.data, table.ctypes.data, head, position, end)
            block, offset = divmod(position, block_size)
            assert length == min(block_size - offset, end - position)
            want = table[block] * block_bytes + head * head_bytes + offset * row_bytes
            assert at - pool.ctypes.data == want
            position += length
        assert position == end
