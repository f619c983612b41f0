"""Rectangles, the plan, the books of what came, the digest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.payloads import KVLayout
from wire.transfer.segment import (
    DESCRIPTOR,
    MAX_SEGMENTS,
    Coverage,
    Rectangle,
    SegmentDescriptor,
    plan,
    segment_digest,
    split_segment,
)

LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=4, dtype="uint8")  # 8 bytes a layer
Cells = set[tuple[int, int]]


def cells(rectangle: Rectangle) -> Cells:
    return {
        (layer, token)
        for layer in range(rectangle.layer_start, rectangle.layer_end)
        for token in range(rectangle.token_start, rectangle.token_end)
    }


@given(
    st.builds(
        KVLayout,
        num_layers=st.integers(1, 5),
        num_kv_heads=st.integers(1, 3),
        head_dim=st.integers(1, 3),
        dtype=st.sampled_from(["uint8", "bfloat16", "float32"]),
    ),
    st.integers(0, 9),
    st.integers(0, 12),
    st.integers(0, 300),
)
def test_a_plan_covers_everything_once_in_order_of_computation(
    layout: KVLayout, first: int, count: int, spare: int
) -> None:
    segment_bytes = layout.token_bytes // layout.num_layers + spare
    rectangles = plan(layout, first, first + count, segment_bytes)
    covered: Cells = set()
    coverage = Coverage(layout, first, first + count)
    for rectangle in rectangles:
        assert 0 < rectangle.num_bytes(layout) <= segment_bytes
        assert not covered & cells(rectangle)
        covered |= cells(rectangle)
        coverage.admit(rectangle)
    whole = Rectangle(0, layout.num_layers, first, count)
    assert covered == cells(whole)
    assert sum(one.num_bytes(layout) for one in rectangles) == whole.num_bytes(layout)
    ends = [rectangle.token_end for rectangle in rectangles]
    assert ends == sorted(ends)


def test_a_row_that_fits_goes_whole_and_one_that_does_not_by_layers() -> None:
    assert plan(LAYOUT, 1, 6, 50) == [
        Rectangle(0, 3, 1, 2),
        Rectangle(0, 3, 3, 2),
        Rectangle(0, 3, 5, 1),
    ]
    assert plan(LAYOUT, 0, 2, 23) == [
        Rectangle(0, 2, 0, 1),
        Rectangle(2, 1, 0, 1),
        Rectangle(0, 2, 1, 1),
        Rectangle(2, 1, 1, 1),
    ]
    assert plan(LAYOUT, 4, 4, 8) == []
    with pytest.raises(LocalProtocolError, match="too small for one layer"):
        plan(LAYOUT, 0, 2, 7)


def test_a_plan_is_never_vast() -> None:
    assert len(plan(LAYOUT, 0, MAX_SEGMENTS, 24)) == MAX_SEGMENTS
    with pytest.raises(LocalProtocolError, match="are too many"):
        plan(LAYOUT, 0, 2**31 - 1, 8)


@given(
    st.lists(
        st.builds(
            Rectangle, st.integers(0, 3), st.integers(0, 3), st.integers(0, 9), st.integers(0, 5)
        ),
        max_size=12,
    )
)
def test_whatever_is_admitted_lies_inside_and_apart(rectangles: list[Rectangle]) -> None:
    coverage = Coverage(LAYOUT, 2, 9)
    inside = cells(Rectangle(0, 3, 2, 7))
    covered: Cells = set()
    ranges: set[tuple[int, int]] = set()
    for rectangle in rectangles:
        layers = (rectangle.layer_start, rectangle.layer_end)
        fits = (
            bool(cells(rectangle))
            and cells(rectangle) <= inside
            and not cells(rectangle) & covered
            and all(layers == one or layers[1] <= one[0] or one[1] <= layers[0] for one in ranges)
        )
        if fits:
            coverage.admit(rectangle)
            covered |= cells(rectangle)
            ranges.add(layers)
        else:
            with pytest.raises(RemoteProtocolError):
                coverage.admit(rectangle)
            assert coverage.admitted.keys() == ranges, "nothing is noted of what is refused"


def test_adjacent_ranges_merge_so_the_books_stay_short() -> None:
    coverage = Coverage(LAYOUT, 0, 1000)
    for token in [*range(0, 1000, 2), *range(1, 1000, 2)]:
        coverage.admit(Rectangle(0, 3, token, 1))
    assert coverage.admitted == {(0, 3): [(0, 1000)]}


@pytest.mark.parametrize(
    ("rectangle", "reason"),
    [
        (Rectangle(0, 0, 0, 1), "empty"),
        (Rectangle(0, 3, 2, 0), "empty"),
        (Rectangle(0, 4, 2, 1), "leaves"),
        (Rectangle(2**32 - 1, 2**32 - 1, 2, 1), "leaves"),
        (Rectangle(0, 3, 1, 1), "leaves"),
        (Rectangle(0, 3, 8, 2), "leaves"),
        (Rectangle(0, 3, 5, 1), "overlaps"),
        (Rectangle(0, 3, 3, 2), "overlaps"),
        (Rectangle(0, 3, 3, 6), "overlaps"),
        (Rectangle(0, 2, 2, 1), "cuts the layers differently"),
        (Rectangle(1, 2, 8, 1), "cuts the layers differently"),
    ],
)
def test_a_wrong_rectangle_is_refused(rectangle: Rectangle, reason: str) -> None:
    coverage = Coverage(LAYOUT, 2, 9)
    coverage.admit(Rectangle(0, 3, 4, 2))
    with pytest.raises(RemoteProtocolError, match=reason):
        coverage.admit(rectangle)


def test_a_descriptor_is_40_bytes_both_ways() -> None:
    descriptor = SegmentDescriptor(1, 2, 3, 4, 5, 2**64 - 1, 6)
    assert DESCRIPTOR.size == 40 == len(descriptor.pack())
    assert SegmentDescriptor.unpack(memoryview(descriptor.pack())) == descriptor
    assert descriptor.rectangle == Rectangle(1, 2, 3, 4)
    for size in (0, 39, 41):
        with pytest.raises(RemoteProtocolError, match=f"{size} bytes, not 40"):
            SegmentDescriptor.unpack(bytes(size))


def test_a_segment_in_one_piece_is_split_without_a_copy() -> None:
    descriptor = SegmentDescriptor(0, 1, 0, 1, 8, 9)
    body = bytearray(descriptor.pack() + b"12345678")
    split, kv = split_segment(body)
    assert split == descriptor and bytes(kv) == b"12345678"
    assert kv.obj is body


def test_the_digest_is_seeded_with_the_request() -> None:
    assert segment_digest(7, b"kv") == xxh3_64_intdigest(b"kv", seed=7)
    assert segment_digest(2**64 - 1, memoryview(b"kv")) != segment_digest(7, b"kv")
