"""Parts together are the whole model's KV, and each is the KV of the model that its process has."""

from __future__ import annotations

from collections import Counter
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.parallel.divided import Divided, divided, rectangles
from wire.layout import KVLayout
from wire.transfer import Rectangle
from worker.executor.torch import layout_of
from worker.parallel.partition import Part

# Group, layer, head.
Places = list[tuple[int, int, int]]


def places(group: int, layers: range, heads: range) -> Places:
    return [*product([group], layers, heads)]


def everything(layout: KVLayout) -> Places:
    return [
        place
        for index, group in enumerate(layout.groups)
        for place in places(index, range(group.num_layers), range(group.num_heads))
    ]


@given(divided())
def test_somebody_keeps_each_head_of_each_layer_and_several_where_heads_are_few(
    one: Divided,
) -> None:
    kept = Counter(
        place
        for part in one.parts
        for group, layers in part.layers.items()
        for place in places(group, layers, part.heads[group])
    )
    copies = max(1, one.size // one.config.num_kv_heads)
    assert kept == dict.fromkeys(everything(one.layout), copies)


@given(divided())
def test_a_part_is_the_layout_of_the_model_that_its_process_computes(one: Divided) -> None:
    for number, (shard, part) in enumerate(zip(one.shards, one.parts, strict=True)):
        assert part.process == number
        assert part.layout == layout_of(shard.of(one.config), torch.float32)
        for group, own in zip(part.layers, part.layout.kv_groups, strict=True):
            whole = one.layout.kv_groups[group]
            assert (own.window, own.num_kv_heads) == (whole.window, len(part.heads[group]))


def whole_again(part: Part, own: Rectangle) -> Rectangle:
    """Return a rectangle of a part as the whole model counts."""
    group = [*part.layers][own.group]
    layers = [part.layers[group][it] for it in own.layers]
    heads = [part.heads[group][it] for it in own.heads]
    return Rectangle(group, _run(layers), _run(heads), own.tokens)


def _run(numbers: list[int]) -> range:
    return range(numbers[0], numbers[-1] + 1)


@given(st.data())
def test_shares_are_a_rectangle_and_are_found_again_in_their_parts(data: st.DataObject) -> None:
    one = data.draw(divided())
    rectangle = data.draw(rectangles(one.layout))
    shared = set[tuple[int, int, int]]()
    for part in one.parts:
        share = part.share(rectangle)
        if share is None:
            continue
        own = part.own(share)
        assert whole_again(part, own) == share and share.tokens == rectangle.tokens
        assert own.num_bytes(part.layout) == share.num_bytes(one.layout)
        assert part.share(share) == share
        shared.update(places(share.group, share.layers, share.heads))
    assert shared == set(places(rectangle.group, rectangle.layers, rectangle.heads))
