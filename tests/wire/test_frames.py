"""Every frame is 16 bytes, both ways, and refuses what SPEC refuses."""

from __future__ import annotations

from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.frames import (
    FRAMES,
    HEADER_BYTES,
    Cancel,
    DecodeToken,
    Frame,
    KvCache,
    Tag,
    frame_of,
)


def test_every_tag_has_a_frame_and_every_frame_is_16_bytes() -> None:
    assert set(FRAMES) == set(Tag)
    for tag, frame in FRAMES.items():
        assert frame.tag == tag
        assert frame.layout.size == HEADER_BYTES
        assert frame.layout.format.startswith("<"), "little-endian, no padding"


@given(st.sampled_from(sorted(FRAMES)), st.binary(min_size=16, max_size=16))
def test_any_header_is_refused_or_comes_back_as_it_was(tag: int, header: bytes) -> None:
    try:
        frame = frame_of(tag, header)
    except RemoteProtocolError:
        return
    assert frame.tag == tag
    assert frame.header() == header
    assert frame_of(tag, memoryview(header)) == frame


@given(st.integers(0, 2**32 - 1), st.binary(max_size=64))
def test_no_bytes_raise_anything_but_a_remote_protocol_error(tag: int, header: bytes) -> None:
    try:
        frame_of(tag, header)
    except RemoteProtocolError:
        pass


@pytest.mark.parametrize(
    ("tag", "header", "reason"),
    [
        (29, bytes(16), "unknown tag 29"),
        (37, bytes(16), "unknown tag 37"),
        (30, bytes(15), "15 bytes, not 16"),
        (30, bytes(17), "17 bytes, not 16"),
        (30, pack("<QII", 0, 3, 3), r"PREFILL_REQUEST: request_id is 0, not 1 to 2\^64 - 1"),
        (34, pack("<QII", 1, 1, 1), "reserved field is 1"),
        (35, pack("<Qq", 1, -1), "no u32"),
        (35, pack("<Qq", 1, 2**32), "no u32"),
        (36, pack("<Qq", 1, 0), "not -1"),
        (40, pack("<QIBBH", 1, 0, 5, 1, 0), "role 5"),
        (40, pack("<QIBBH", 1, 0, 1, 1, 256), "reserved field is 256"),
        (43, pack("<QII", 1, 0, 9), "reserved field is 9"),
        (44, pack("<QII", 1, 0, 9), "reserved field is 9"),
        (45, pack("<QII", 1, 0, 9), "reserved field is 9"),
        (44, pack("<QII", 1, 0, 9), "reserved field is 9"),
        (46, pack("<QII", 1, 0, 9), "ask 9 is not one of 0 to 2"),
    ],
)
def test_a_malformed_header_is_the_peers_fault(tag: int, header: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        frame_of(tag, header)


@pytest.mark.parametrize(
    "frame", [KvCache(2**64, 0, 0), KvCache(0, -1, 0), Cancel(0, 2**32), DecodeToken(1, 2**63)]
)
def test_a_field_too_wide_is_our_own_fault(frame: Frame) -> None:
    with pytest.raises(LocalProtocolError, match="does not fit"):
        frame.header()
