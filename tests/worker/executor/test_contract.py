"""The contract of every executor's KV cache, tested on the one that needs no model."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.kv import part, whole
from wire.layout import KVGroup, StateGroup
from wire.transfer import Rectangle, plan
from worker.compute.contract import KVCache
from worker.executor.contract import Attention, Executor, MemoryRequirements
from worker.executor.hash import LAYOUT, MIXED
from worker.executor.registry import create


def cache_of(num_blocks: int, block_size: int, name: str = "hash") -> KVCache:
    executor: Executor = create(name)
    room = (8,) if executor.info.layout.has_state else ()
    return executor.allocate(num_blocks, block_size, *room)


def random_bytes(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@st.composite
def rectangles(draw: st.DrawFn, num_layers: int, num_heads: int, num_tokens: int) -> Rectangle:
    sizes = (num_layers, num_heads, num_tokens)
    starts = [draw(st.integers(0, size - 1)) for size in sizes]
    layers, heads, tokens = (
        range(start, draw(st.integers(start + 1, size)))
        for start, size in zip(starts, sizes, strict=True)
    )
    return Rectangle(0, layers, heads, tokens)


@settings(max_examples=60, database=None)
@given(
    st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 2, 5, 16]), rectangles(2, 2, 24), st.data()
)
def test_a_rectangle_crosses_to_another_block_size(
    ours: int, theirs: int, rectangle: Rectangle, data: st.DataObject
) -> None:
    caches, tables = [], []
    for block_size in (ours, theirs):
        caches.append(cache_of(30, block_size))
        tables.append(data.draw(st.permutations(range(30)))[: -(-24 // block_size)])
    size = len(rectangle.tokens) * len(rectangle.layers) * len(rectangle.heads) * 2 * 8
    segment = random_bytes(size, 7)
    caches[0].unpack(tables[0], rectangle, segment)
    packed = caches[0].pack(tables[0], rectangle)
    assert packed == segment and packed.contiguous
    caches[1].unpack(tables[1], rectangle, packed)
    assert caches[1].pack(tables[1], rectangle) == segment


def test_a_whole_block_is_seen_where_it_lies() -> None:
    cache: Any = cache_of(4, 4)  # no cache has to have a `view`
    block = whole(cache.layout, 4, 4)
    segment = random_bytes(4 * cache.layout.token_bytes, 3)
    cache.unpack([2, 0], block, segment)
    seen = cache.view([2, 0], block)
    assert seen == segment
    for rectangle in (whole(cache.layout, 4, 3), whole(cache.layout, 2, 4)):
        assert cache.view([2, 0, 1], rectangle) is None
    assert cache.view([2, 0], block._replace(heads=range(1))) is None
    cache.unpack([2, 0], block, bytes(len(segment)))
    assert not any(seen)


MIXED_NAME = "worker.executor.hash:create_mixed"
# What is sent of 18 tokens: of layers that see all, of those with a window, and a state; in halves.
SENT = plan(MIXED, 2, 18, 1 << 20, num_shards=2)


@pytest.mark.parametrize("rectangle", SENT, ids=lambda it: f"group {it.group} {it.heads}")
@pytest.mark.parametrize("sizes", [(4, 4), (4, 3), (1, 16)], ids=str)
def test_each_kind_of_layers_is_transferred_by_itself(
    sizes: tuple[int, int], rectangle: Rectangle
) -> None:
    ours, theirs = (cache_of(24, size, MIXED_NAME) for size in sizes)
    table = list(range(20, 1, -1))
    contents = [random_bytes(one.num_bytes(MIXED), seed) for seed, one in enumerate(SENT)]
    for one, content in zip(SENT, contents, strict=True):
        ours.unpack(table, one, content)
    assert [bytes(ours.pack(table, one)) for one in SENT] == contents
    packed = ours.pack(table, rectangle)
    theirs.unpack(table[1:], rectangle, packed)
    assert theirs.pack(table[1:], rectangle) == packed == contents[SENT.index(rectangle)]
    # Nothing else was written there, and what was packed stays as it was.
    has_state = isinstance(MIXED.groups[rectangle.group], StateGroup)
    kinds = (KVGroup, StateGroup) if has_state else KVGroup
    there = [one for one in SENT if isinstance(MIXED.groups[one.group], kinds)]
    assert not any(any(theirs.pack(table[1:], one)) for one in there if one != rectangle)
    if not has_state:
        with pytest.raises(ValueError, match="no state after 18 tokens"):
            theirs.pack(table[1:], SENT[-1])
    ours.unpack(table, rectangle, random_bytes(len(packed), 99))
    assert packed == contents[SENT.index(rectangle)]


@pytest.mark.parametrize(
    "rectangle",
    [
        whole(MIXED, 4, 1, group=2),
        whole(MIXED, 0, 0, group=2),
        whole(MIXED, 17, 0, group=2),
        whole(MIXED, 4, 0, group=1),
        whole(MIXED, 4, 1)._replace(group=3),
        whole(MIXED, 4, 1)._replace(heads=range(3)),
        whole(MIXED, 4, 1)._replace(heads=range(1, 1)),
        part(MIXED, 2, 1, 4, 0, group=2),
    ],
)
def test_a_rectangle_outside_the_layout_is_refused(rectangle: Rectangle) -> None:
    cache = cache_of(4, 4, MIXED_NAME)
    with pytest.raises(ValueError, match="is not within 4 blocks"):
        cache.pack([0, 1, 2, 3], rectangle)


@pytest.mark.parametrize(
    ("rectangle", "num_bytes"),
    [
        (whole(LAYOUT, 0, 4), 4 * 64 - 1),
        (whole(LAYOUT, 0, 4), 5 * 64),
        (part(LAYOUT, 0, 1, 0, 4), 4 * 64),
        (whole(LAYOUT, 0, 0), 0),
        (part(LAYOUT, 1, 2, 0, 4), 4 * 64),
        (whole(LAYOUT, 5, 4), 4 * 64),
        (whole(LAYOUT, -1, 1), 64),
    ],
)
def test_a_segment_that_does_not_fit_is_refused(rectangle: Rectangle, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="Rectangle"):
        cache_of(4, 4).unpack([0, 1], rectangle, bytes(num_bytes))


def test_the_numbers_of_heads_decide_the_kind_of_attention() -> None:
    kinds = [Attention.of(8, 8), Attention.of(8, 2), Attention.of(8, 1), Attention.of(1, 1)]
    grouped = [Attention.MULTI_HEAD, Attention.GROUPED_QUERY, Attention.MULTI_QUERY]
    assert kinds == [*grouped, Attention.MULTI_HEAD]


@given(st.integers(0, 10**9), st.integers(0, 10**4), st.integers(1, 10**6), st.integers(1, 64))
def test_the_blocks_that_memory_pays_for_fit_and_one_more_does_not(
    parameters: int, activation: int, kv: int, block_size: int
) -> None:
    memory = MemoryRequirements(parameters, activation, kv)
    least = memory.total(512, 1, block_size)
    for memory_bytes in (least, least + kv * block_size - 1, 3 * least):
        num_blocks = memory.num_blocks(memory_bytes, 512, block_size)
        assert num_blocks >= 1
        assert memory.total(512, num_blocks, block_size) <= memory_bytes
        assert memory.total(512, num_blocks + 1, block_size) > memory_bytes
    with pytest.raises(ValueError, match=f"it takes {least}"):
        memory.num_blocks(least - 1, 512, block_size)
