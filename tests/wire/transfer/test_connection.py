"""The bytes of a connection for segments: heads there and back, and what is no head."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import RemoteProtocolError
from wire.frames import Cancel, KvCache
from wire.stream import encode
from wire.transfer import (
    HEAD_BYTES,
    TOKEN_BYTES,
    Rectangle,
    SegmentDescriptor,
    new_token,
    read_head,
    segment_head,
)
from wire.transfer.sealing import MAX_SEALED_BYTES

DESCRIPTOR = SegmentDescriptor.of(Rectangle(0, range(2), range(1), range(3)), 48, 7)


@given(st.integers(1, 2**64 - 1), st.integers(1, 2**32 - 1), st.integers(1, MAX_SEALED_BYTES))
def test_a_segment_head_is_read_back(request_id: int, number: int, num_bytes: int) -> None:
    frame = KvCache(request_id, number, 2**32 - 1)
    head = segment_head(frame, DESCRIPTOR, num_bytes)
    assert len(head) == HEAD_BYTES
    assert read_head(head) == (frame, DESCRIPTOR.pack(), num_bytes)


def test_a_segment_is_enveloped_as_on_raw_tcp() -> None:
    frame, kv = KvCache(1, 2, 3), bytes(48)
    assert segment_head(frame, DESCRIPTOR, 48) + kv == b"".join(
        encode(frame, DESCRIPTOR.pack(), kv)
    )


@pytest.mark.parametrize(
    "head",
    [
        bytes(HEAD_BYTES),
        segment_head(KvCache(1, 0, 0), DESCRIPTOR, 48),
        segment_head(KvCache(0, 1, 1), DESCRIPTOR, 48),
        segment_head(KvCache(1, 1, 1), DESCRIPTOR, 0),
        segment_head(KvCache(1, 1, 1), DESCRIPTOR, MAX_SEALED_BYTES + 1),
        b"".join(encode(Cancel(1, 12), bytes(96)))[:HEAD_BYTES],
    ],
    ids=["zeros", "segment 0", "request_id 0", "no KV", "too much KV", "another tag"],
)
def test_an_invalid_segment_head_is_refused(head: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_head(head)


def test_tokens_differ() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100 and {len(token) for token in tokens} == {TOKEN_BYTES}
