"""The cache of all parts is, byte for byte, the one of a process that has the whole model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kv import whole
from tests.worker.parallel.divided import NUM_TOKENS, Divided, divided, model_of, rectangles
from wire.layout import KVLayout
from wire.transfer import plan
from worker.compute.kv_cache import TorchKVCache
from worker.parallel.kv_cache import ShardedKVCache
from worker.parallel.kv_copies import OwnPart
from worker.parallel.partition import Part

NUM_BLOCKS, BLOCK_SIZE = 8, 4
TABLE = [6, 1, 3, 0, 7, 2]


class Caches(NamedTuple):
    """A cache of one process, and one of several parts, which are all in this process here."""

    one: TorchKVCache
    sharded: ShardedKVCache
    layout: KVLayout
    every: list[tuple[Part, OwnPart]]


def cache_of(layout: KVLayout) -> TorchKVCache:
    return TorchKVCache(layout, NUM_BLOCKS, BLOCK_SIZE, torch.device("cpu"))


def empty(model: Divided) -> Caches:
    parts = [(part, cache_of(part.layout)) for part in model.parts]
    every = [(part, OwnPart(cache, part)) for part, cache in parts]
    sharded = ShardedKVCache(model.layout, parts[0][1], every)
    return Caches(cache_of(model.layout), sharded, model.layout, every)


def filled(model: Divided) -> Caches:
    caches = empty(model)
    for group in range(len(model.layout.groups)):
        rectangle = whole(model.layout, 0, NUM_TOKENS, group)
        segment = np.random.default_rng(group).bytes(rectangle.num_bytes(model.layout))
        caches.one.unpack(TABLE, rectangle, segment)
        caches.sharded.unpack(TABLE, rectangle, segment)
    return caches


@given(st.data())
def test_any_rectangle_leaves_as_from_one_process(data: st.DataObject) -> None:
    caches = filled(data.draw(divided()))
    for _ in range(3):
        rectangle = data.draw(rectangles(caches.layout))
        packed = caches.sharded.pack(TABLE, rectangle)
        assert packed == caches.one.pack(TABLE, rectangle)
        assert packed.contiguous and packed.ndim == 1 and packed.format == "B"


@given(st.data())
def test_any_rectangle_comes_in_as_into_one_process(data: st.DataObject) -> None:
    caches = filled(data.draw(divided()))
    for number in range(3):
        rectangle = data.draw(rectangles(caches.layout))
        segment = np.random.default_rng(9 + number).bytes(rectangle.num_bytes(caches.layout))
        caches.one.unpack(TABLE, rectangle, segment)
        caches.sharded.unpack(TABLE, rectangle, segment)
    for group in range(len(caches.layout.groups)):
        everything = whole(caches.layout, 0, NUM_TOKENS, group)
        assert caches.sharded.pack(TABLE, everything) == caches.one.pack(TABLE, everything)
        for part, own in caches.every:  # where several keep a head, all of them have it
            if (share := part.share(everything)) is not None:
                assert own.pack(TABLE, share) == caches.one.pack(TABLE, share)


@given(divided(), st.integers(0, 12), st.integers(1, 12), st.integers(0, 300))
def test_what_is_sent_is_cut_so_that_each_segment_is_in_one_part(
    model: Divided, cached: int, count: int, spare: int
) -> None:
    cache = empty(model).sharded
    segment_bytes = model.layout.piece_bytes + spare
    for rectangle in plan(
        *(model.layout, cached, cached + count, segment_bytes), cache.num_shards, cache.stages
    ):
        shares = {part.share(rectangle) for part in model.parts} - {None}
        assert shares == {rectangle}


@given(divided())
def test_it_says_what_the_engine_and_the_transfers_ask(model: Divided) -> None:
    own = cache_of(model.parts[0].layout)
    own.copies_at_once = 4  # as on a GPU
    cache = ShardedKVCache(model.layout, own, empty(model).every)
    assert (cache.num_blocks, cache.block_size) == (NUM_BLOCKS, BLOCK_SIZE)
    assert cache.layout == model.layout and cache.copies_at_once == 4
    assert cache.stages is not None and cache.copies_wait
    assert cache.num_shards == min(model.size, model.config.num_kv_heads)
    for group, stages in zip(model.layout.groups, cache.stages, strict=True):
        assert [layer for stage in stages for layer in stage] == [*range(group.num_layers)]


@pytest.mark.parametrize("more", [-1, 1])
def test_a_segment_of_another_size_is_refused_before_any_part_has_it(more: int) -> None:
    caches = filled(model_of([None, 3], size=2, stages=2))
    rectangle = whole(caches.layout, 2, 9)
    before = bytes(caches.sharded.pack(TABLE, rectangle))
    with pytest.raises(ValueError, match=f"has {len(before) + more} bytes, .* {len(before)}"):
        caches.sharded.unpack(TABLE, rectangle, bytes(len(before) + more))
    assert caches.sharded.pack(TABLE, rectangle) == before
