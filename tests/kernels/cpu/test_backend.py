"""Tests of the compiled backend alone; `test_operators` tests its results."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import kernels
from kernels import Softmax
from kernels.cpu import backend as cpu
from tests.kernels.scenes import check, scene


def test_more_query_heads_on_one_kv_head_than_an_item_has_rows() -> None:
    it = scene([(70, 1), (20, 20)], num_heads=100, num_kv_heads=1)
    check(it, None, cpu)


def test_a_query_that_is_a_slice_of_a_projection() -> None:
    it = scene([(40, 9), (7, 1)])
    wide = torch.randn(10, 4 + 7, 16)
    wide[:, :4] = it.query
    check(it._replace(query=wide[:, :4]), None, cpu)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(num_threads: int) -> None:
    it = scene([(64, 30), (33, 1), (12, 12)])
    usual = torch.get_num_threads()
    want = cpu.paged_attention(it.query, it.pool, 0, it.batch, Softmax(0.25))
    torch.set_num_threads(num_threads)
    try:
        got = cpu.paged_attention(it.query, it.pool, 0, it.batch, Softmax(0.25))
    finally:
        torch.set_num_threads(usual)
    assert torch.equal(got, want)


def test_no_bit_of_a_sequence_depends_on_its_batch_mates() -> None:
    it = scene([(64, 30), (33, 1), (12, 12), (70, 1)])
    together = cpu.paged_attention(it.query, it.pool, 0, it.batch, Softmax(0.25))
    for sequence, (begin, end) in enumerate(pairwise(it.batch.query_starts.tolist())):
        alone = kernels.PagedBatch(
            slots=it.batch.slots[begin:end],
            query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
            context_lens=it.batch.context_lens[sequence : sequence + 1],
            block_tables=it.batch.block_tables[sequence : sequence + 1],
        )
        got = cpu.paged_attention(it.query[begin:end], it.pool, 0, alone, Softmax(0.25))
        assert torch.equal(got, together[begin:end])


def test_an_empty_batch() -> None:
    it = scene([(5, 1)])
    batch = kernels.PagedBatch(
        slots=torch.zeros(0, dtype=torch.int32),
        query_starts=torch.zeros(1, dtype=torch.int32),
        context_lens=torch.zeros(0, dtype=torch.int32),
        block_tables=torch.zeros(0, 1, dtype=torch.int32),
    )
    query = torch.zeros(0, 4, 16)
    assert cpu.paged_attention(query, it.pool, 0, batch, Softmax(1.0)).shape == (0, 4, 16)
