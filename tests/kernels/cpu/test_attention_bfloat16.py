"""Attention of many queries in bfloat16: its parts, and the whole beside float32's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels import PagedBatch, Softmax, reference
from kernels.cpu.attention import attend
from kernels.cpu.bfloat16_methods import Way
from kernels.cpu.program import Program
from kernels.cpu.work_items import WorkItems
from tests.kernels.cpu.paired import WAYS, holds_tiles
from tests.kernels.scenes import Scene, scene, sinks_of


def outputs(
    it: Scene, window: int | None, way: Way, num_threads: int = 0, **softmax: Any
) -> torch.Tensor:
    """Return what the operation gives for a step."""
    query = it.query.float().contiguous()
    out = torch.full(query.shape, torch.nan, dtype=torch.bfloat16)
    items = WorkItems(query.shape[1] // it.pool.shape[3])
    items.set(it.batch)
    scale = query.shape[2] ** -0.5
    weights = Softmax(scale, window, **softmax)
    attention = attend(query, it.pool, 1, items, out, weights, way)
    Program([items.plan(), attention]).run(num_threads)
    return out.float()


def attended(
    lens: list[tuple[int, int]], window: int | None, way: Way, **shape: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the operation gives for a step, and what the reference does."""
    it = scene(lens, dtype=torch.bfloat16, **shape)
    # Queries are rounded after they are scaled: of a score of 100 that is half a one.
    scale = it.query.shape[2] ** -0.5
    factor = scale * math.log2(math.e)
    query = (it.query.float() * factor).bfloat16().float() / factor
    want = reference.paged_attention(query, it.pool.float(), 1, it.batch, Softmax(scale, window))
    return outputs(it, window, way), want


LENS = [(12, 12), (140, 140), (65, 40), (300, 17), (64, 64), (33, 17), (1, 1), (200, 1), (131, 3)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 32, "block_size": 24},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "block_size": 7},
    ],
)
def test_outputs_are_those_of_float32_but_for_rounding(
    shape: dict[str, int], window: int | None, way: Way
) -> None:
    got, want = attended(LENS, window, way, **shape)
    # Weights and outputs are rounded once each, to 8 bits.
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [None, 70])
def test_sinks_and_caps(window: int | None, way: Way) -> None:
    it = scene(LENS, dtype=torch.bfloat16, num_heads=6, head_dim=64)
    factor = 64**-0.5 * math.log2(math.e)
    query = (it.query.float() * factor).bfloat16().float() / factor
    for cap, sinks in ((None, sinks_of(it)), (3.0, None), (30.0, sinks_of(it, 1))):
        pool = it.pool.float()
        softmax = Softmax(64**-0.5, window, cap, sinks)
        want = reference.paged_attention(query, pool, 1, it.batch, softmax)
        got = outputs(it, window, way, cap=cap, sinks=sinks)
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [1, 43, 44, 127, 128, 170, 171, 172, 299])
def test_the_last_key_before_a_window_is_not_seen(window: int, way: Way) -> None:
    """Tiles begin at 128 and 256: one may be seen whole but for its first key."""
    it = scene([(300, 1)], dtype=torch.bfloat16, head_dim=64)
    want = outputs(it, window, way)
    block, offset = divmod(299 - window, it.pool.shape[4])
    keys, values = it.pool[it.batch.block_tables[0, block], 1, :, :, offset]
    keys.fill_(0)
    values.fill_(100)
    assert torch.equal(outputs(it, window, way), want)


@pytest.mark.skipif(Way.TILES not in WAYS, reason="this processor has no AMX")
@pytest.mark.parametrize("window", [None, 70])
def test_tiles_and_vectors_give_the_same_bits(window: int | None) -> None:
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
    both = Way.VECTORS, Way.TILES
    by_vectors, by_tiles = (attended(LENS, window, way, **shape)[0] for way in both)
    assert torch.equal(by_vectors, by_tiles)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [None, 70])
def test_no_bit_of_a_row_depends_on_the_rows_beside_it(window: int | None, way: Way) -> None:
    """A token that is generated has what it has when the text is read again, in any chunks."""
    it = scene([(300, 300)], dtype=torch.bfloat16, num_heads=6, head_dim=64)
    query, items = it.query.float().contiguous(), WorkItems(3)

    def computed(begin: int, end: int) -> torch.Tensor:
        items.set(
            PagedBatch(
                slots=it.batch.slots[begin:end],
                query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
                context_lens=torch.tensor([end], dtype=torch.int32),
                block_tables=it.batch.block_tables,
            )
        )
        some, out = query[begin:end], torch.empty(end - begin, 6, 64, dtype=torch.bfloat16)
        attention = attend(some, it.pool, 1, items, out, Softmax(0.125, window), way)
        Program([items.plan(), attention]).run()
        return out

    together = computed(0, 300)
    for begin, end in ((0, 1), (0, 40), (40, 41), (127, 128), (128, 129), (129, 260), (260, 300)):
        assert torch.equal(computed(begin, end), together[begin:end])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("lens", [[(200, 100), (20, 20)], [(200, 100), (200, 1), (130, 30)]])
def test_a_sequence_of_nan_is_nobody_elses(
    lens: list[tuple[int, int]], window: int | None, way: Way
) -> None:
    it = scene(lens, head_dim=64, dtype=torch.bfloat16)
    # One thread, so that the others find in its memory what the first has left there.
    want = outputs(it, window, way, num_threads=1)[100:]
    blocks = it.batch.block_tables[0, : -(-200 // it.pool.shape[4])]
    it.pool[blocks.long()] = torch.nan
    got = outputs(it, window, way, num_threads=1)
    assert got[:100].isnan().all() and torch.equal(got[100:], want)


@pytest.mark.skipif(Way.TILES not in WAYS, reason="this processor has no AMX")
def test_attention_leaves_no_tiles_behind() -> None:
    it = scene([(40, 40), (9, 1)], head_dim=64, dtype=torch.bfloat16)
    outputs(it, None, Way.TILES, num_threads=1)
    assert not holds_tiles()
