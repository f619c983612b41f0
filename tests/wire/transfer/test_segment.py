"""Rectangles, the plan, the books of what came, the digest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tests.kv import part, whole
from tests.wire.transfer.layouts import layouts
from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.frames import KvCache
from wire.layout import KVGroup, KVLayout, StateGroup
from wire.transfer.segment import (
    DESCRIPTOR,
    MAX_SEGMENTS,
    MAX_UNASKED_SEGMENTS,
    Coverage,
    Rectangle,
    SegmentDescriptor,
    pack_places,
    plan,
    running_digest,
    segment_digest,
    split_segment,
    unasked_segments,
    unpack_places,
)

LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=1, head_dim=4, dtype="uint8")
WIDE = KVGroup(num_layers=3, num_kv_heads=4, key_dim=2, value_dim=1, dtype="uint8", window=4)
STATE = StateGroup(num_layers=2, num_heads=4, head_bytes=5)
MIXED = KVLayout(groups=(WIDE, STATE))
# Group, layer, head, token; of a state its position.
Cells = set[tuple[int, int, int, int]]


def cells(layout: KVLayout, rectangle: Rectangle) -> Cells:
    group, layers, heads, tokens = rectangle
    places: Iterable[int] = tokens
    if isinstance(layout.groups[group], StateGroup):
        places = [] if tokens else [tokens.start]  # a state has a position and no tokens
    return {(group, layer, head, it) for layer in layers for head in heads for it in places}


def everything(layout: KVLayout, cached: int, num_tokens: int) -> Cells:
    """The ranges that are sent, by the words of SPEC 6.2."""
    sent: Cells = set()
    if cached == num_tokens:
        return sent
    for index, group in enumerate(layout.groups):
        places = [num_tokens]
        if isinstance(group, KVGroup):
            window = group.window or num_tokens + 1
            # The next token is at num_tokens, and sees `window` positions with its own.
            seen = range(num_tokens - window + 1, num_tokens)
            places = [token for token in seen if token >= cached]
        sent |= {
            (index, layer, head, place)
            for layer in range(group.num_layers)
            for head in range(group.num_heads)
            for place in places
        }
    return sent


@st.composite
def cut_layers(draw: st.DrawFn, layout: KVLayout) -> list[list[range]]:
    """Which layers of each group are in one place: runs of any lengths."""
    stages = []
    for group in layout.groups:
        inner = draw(st.sets(st.integers(1, group.num_layers)))
        borders = sorted({0, *inner, group.num_layers})
        stages.append([range(start, end) for start, end in pairwise(borders)])
    return stages


@given(
    st.data(),
    st.integers(0, 40),
    st.integers(0, 12) | st.integers(0, 40),
    st.integers(0, 300),
    st.integers(1, 4),
    st.integers(1, 8),
    st.booleans(),
)
def test_a_plan_covers_the_transfer_once_in_order_of_computation(
    data: st.DataObject,
    cached: int,
    count: int,
    spare: int,
    num_shards: int,
    block_size: int,
    is_read: bool,
) -> None:
    layout = data.draw(layouts())
    stages = data.draw(st.none() | cut_layers(layout))
    num_tokens, segment_bytes = cached + count, layout.piece_bytes + spare
    read_bytes = 3 * segment_bytes if is_read else 0
    rectangles = plan(
        *(layout, cached, num_tokens, segment_bytes, num_shards, stages, block_size, read_bytes)
    )
    coverage = Coverage(layout, cached, num_tokens)
    for rectangle in rectangles:
        coverage.admit(rectangle)  # which refuses overlaps
        layers, tokens = rectangle.layers, rectangle.tokens
        places = [range(1024)] if stages is None else stages[rectangle.group]
        assert any(it.start <= layers.start < layers.stop <= it.stop for it in places)
        is_whole = bool(tokens) and tokens.start % block_size == tokens.stop % block_size == 0
        has_whole = -(-tokens.start // block_size) < tokens.stop // block_size
        assert is_whole or not (is_read and has_whole), "parts of blocks cannot be read in memory"
        most_bytes = read_bytes if is_read and is_whole else segment_bytes
        assert 0 < rectangle.num_bytes(layout) <= most_bytes
    found = [cells(layout, rectangle) for rectangle in rectangles]
    assert set().union(*found) == everything(layout, cached, num_tokens)
    num_bytes = sum(one.num_bytes(layout) for one in rectangles)
    assert num_bytes == layout.transfer_bytes(num_tokens, cached)
    ends = [rectangle.tokens.stop for rectangle in rectangles]
    assert ends == sorted(ends)
    for index, group in enumerate(layout.groups):
        shares = {one.heads for one in rectangles if one.group == index}
        assert len(shares) in (0, min(num_shards, group.num_heads))


def test_cuts_are_at_the_ends_of_blocks_where_blocks_fit() -> None:
    assert plan(LAYOUT, 1, 9, 100, block_size=2) == [
        whole(LAYOUT, 1, 3),
        whole(LAYOUT, 4, 4),
        whole(LAYOUT, 8, 1),
    ]
    # Two layers of a block fit, three do not; they are divided evenly.
    assert plan(LAYOUT, 1, 3, 47, block_size=2) == [
        part(LAYOUT, 0, 2, 1, 1),
        part(LAYOUT, 2, 1, 1, 1),
        part(LAYOUT, 0, 2, 2, 1),
        part(LAYOUT, 2, 1, 2, 1),
    ]
    # Not even one layer of a block fits.
    assert plan(LAYOUT, 0, 2, 30, block_size=4) == plan(LAYOUT, 0, 2, 30)


def test_a_large_block_is_sent_alone() -> None:
    layout = KVLayout.uniform(num_layers=32, num_kv_heads=4, head_dim=64, dtype="bfloat16")
    rectangles = plan(layout, 0, 40, 4 << 20, block_size=16)  # 512 KiB a block
    assert rectangles == [whole(layout, 0, 16), whole(layout, 16, 16), whole(layout, 32, 8)]


def test_blocks_that_are_read_where_they_lie_are_joined_but_for_their_parts() -> None:
    layout = KVLayout.uniform(num_layers=32, num_kv_heads=4, head_dim=64, dtype="bfloat16")
    rectangles = plan(layout, 10, 100, 2 << 20, block_size=16, read_bytes=3 << 19)
    starts = [10, 16, 64, 96, 100]  # three blocks at a time
    assert rectangles == [whole(layout, a, b - a) for a, b in pairwise(starts)]


def test_parts_of_two_blocks_are_not_joined_for_they_have_to_be_sent() -> None:
    layout = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype="float32")
    rectangles = plan(layout, 1, 31, 4 << 20, block_size=16, read_bytes=16 << 20)
    assert rectangles == [whole(layout, 1, 15), whole(layout, 16, 15)]


def test_a_group_of_which_nothing_is_sent_needs_no_room() -> None:
    groups = [
        KVGroup(
            num_layers=1, num_kv_heads=1, key_dim=dim, value_dim=0, dtype="uint8", window=window
        )
        for dim, window in ((1, None), (9, 1))
    ]
    layout = KVLayout(groups=tuple(groups))
    assert plan(layout, 0, 4, layout.transfer_bytes(4)) == [whole(layout, 0, 4)]


def test_a_segment_size_below_one_layer_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="too small for one layer"):
        plan(LAYOUT, 0, 2, 7)


def test_a_plan_is_never_vast() -> None:
    assert len(plan(LAYOUT, 0, MAX_SEGMENTS, 24)) == MAX_SEGMENTS
    with pytest.raises(LocalProtocolError, match="are too many"):
        plan(LAYOUT, 0, 2**31 - 1, 8)
    vast = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=4, dtype="uint8")
    with pytest.raises(LocalProtocolError, match=f"than {MAX_SEGMENTS} segments .* too many"):
        plan(vast, 0, MAX_SEGMENTS, 24, num_shards=2)
    most = 4 * MAX_SEGMENTS - 5  # with the parts of blocks at both ends
    assert len(plan(LAYOUT, 1, most, 48, block_size=2, read_bytes=96)) == MAX_SEGMENTS
    with pytest.raises(LocalProtocolError, match="are too many"):
        plan(LAYOUT, 1, most + 2, 48, block_size=2, read_bytes=96)


def _are_apart(cut: range, cuts: set[range]) -> bool:
    return all(cut == one or cut.stop <= one.start or one.stop <= cut.start for one in cuts)


@given(
    st.lists(
        st.builds(
            Rectangle,
            st.integers(0, 2),
            st.sampled_from([range(2), range(2, 3), range(3), range(1, 3), range(1, 4), range(0)]),
            st.sampled_from([range(4), range(2), range(2, 4), range(1, 3), range(3, 5), range(0)]),
            st.sampled_from([range(a, b) for a in range(4, 11) for b in range(a, 11)]),
        ),
        max_size=14,
    )
)
def test_admitted_rectangles_lie_inside_and_apart(rectangles: list[Rectangle]) -> None:
    coverage = Coverage(MIXED, 5, 9)
    inside = everything(MIXED, 5, 9)
    covered: Cells = set()
    cuts: list[tuple[set[range], set[range]]] = [(set(), set()), (set(), set())]
    for rectangle in rectangles:
        group, layers, heads, _ = rectangle
        is_none = group == 2 or (group == 1 and rectangle.tokens)  # a state has no tokens
        found = set() if is_none else cells(MIXED, rectangle)
        fits = (
            bool(found)
            and found <= inside
            and not found & covered
            and _are_apart(layers, cuts[group][0])
            and _are_apart(heads, cuts[group][1])
        )
        if fits:
            coverage.admit(rectangle)
            covered |= found
            cuts[group][0].add(layers)
            cuts[group][1].add(heads)
        else:
            before = [dict(book.admitted) for book in coverage.books]
            with pytest.raises(RemoteProtocolError):
                coverage.admit(rectangle)
            assert [book.admitted for book in coverage.books] == before, "nothing is noted of it"


def test_adjacent_ranges_merge_so_the_books_stay_short() -> None:
    coverage = Coverage(LAYOUT, 0, 1000)
    for token in [*range(0, 1000, 2), *range(1, 1000, 2)]:
        coverage.admit(whole(LAYOUT, token, 1))
    assert [book.admitted for book in coverage.books] == [{(range(3), range(1)): [(0, 1000)]}]


def test_a_descriptor_is_48_bytes_both_ways() -> None:
    descriptor = SegmentDescriptor(1, 2, 3, 4, 5, 6, 7, 8, 2**64 - 1, 9, 1)
    assert DESCRIPTOR.size == 48 == len(descriptor.pack())
    assert SegmentDescriptor.unpack(memoryview(descriptor.pack())) == descriptor
    rectangle = Rectangle(1, range(4, 9), range(2, 5), range(6, 13))
    assert descriptor.rectangle == rectangle
    assert SegmentDescriptor.of(rectangle, 8, 2**64 - 1, 9, 1) == descriptor
    for size in (0, 40, 47, 49):
        with pytest.raises(RemoteProtocolError, match=f"{size} bytes, not 48"):
            SegmentDescriptor.unpack(bytes(size))
    with pytest.raises(RemoteProtocolError, match="in_memory is 256"):
        SegmentDescriptor.unpack(bytes(7) + b"\1" + bytes(40))


def test_a_segment_in_one_piece_is_split_without_a_copy() -> None:
    descriptor = SegmentDescriptor.of(part(LAYOUT, 0, 1, 0, 1), 8, 9)
    body = bytearray(descriptor.pack() + b"12345678")
    split, kv = split_segment(body)
    assert split == descriptor and bytes(kv) == b"12345678"
    assert kv.obj is body


def test_a_rectangle_is_cut_into_pieces_of_as_many_tokens() -> None:
    rectangle = whole(LAYOUT, 4, 6)
    assert rectangle.pieces(1) == [rectangle]
    assert rectangle.pieces(3) == [whole(LAYOUT, first, 2) for first in (4, 6, 8)]
    state = Rectangle(1, range(2), range(4), range(9, 9))
    assert state.pieces(1) == [state]


def test_places_are_u64() -> None:
    assert unpack_places(pack_places([2**64 - 1, 0])) == (2**64 - 1, 0)
    for size in (1, 7, 12):
        with pytest.raises(RemoteProtocolError, match=f"{size} bytes, not n x 8"):
            unpack_places(bytes(size))


def test_a_digest_is_seeded_with_the_request_and_may_be_fed_in_parts() -> None:
    digest = running_digest(7)
    digest.update(b"k")
    digest.update(memoryview(b"v"))
    assert digest.intdigest() == segment_digest(7, b"kv") == xxh3_64_intdigest(b"kv", seed=7)


def test_segments_that_come_with_an_offer_are_found_in_its_parts() -> None:
    parts = [b"the map", bytes(48), b"one", bytes(48), b"two"]
    found = unasked_segments(KvCache(1, 0, 2), parts, 6)
    assert found == [(bytes(48), b"one"), (bytes(48), b"two")]
    assert unasked_segments(KvCache(1, 0, 0), [b"the", b"map"], 0) == []
    most = [bytes(48), b"1"] * MAX_UNASKED_SEGMENTS
    found = unasked_segments(KvCache(1, 0, MAX_UNASKED_SEGMENTS), [b"the map", *most], 16)
    assert len(found) == MAX_UNASKED_SEGMENTS == 16


@pytest.mark.parametrize(
    ("number", "parts", "most_bytes", "reason"),
    [
        (2, [bytes(48), b"one", bytes(48), b"two"], 5, "6 bytes of KV with an offer, 5 are taken"),
        (2, [bytes(48), b"one", bytes(48)], 9, "2 segments with an offer in 3 parts"),
        (1, [bytes(48), b"one", bytes(48), b"two"], 9, "1 segments with an offer in 4 parts"),
        (1, [bytes(47), b"one"], 9, "descriptor with an offer has not 48 bytes"),
        (1, [], 9, "in 0 parts"),
        (MAX_UNASKED_SEGMENTS + 1, [bytes(48), b"1"] * (MAX_UNASKED_SEGMENTS + 1), 99, "17 seg"),
    ],
)
def test_wrong_segments_with_an_offer_are_refused(
    number: int, parts: list[bytes], most_bytes: int, reason: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        unasked_segments(KvCache(1, 0, number), [b"the map", *parts], most_bytes)
