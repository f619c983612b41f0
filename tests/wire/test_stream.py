"""The raw TCP envelope: chunking never matters, limits come before allocation."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import RemoteProtocolError
from wire.frames import FRAMES, Cancel, DecodeToken, Frame, PrefillRequest, Tag
from wire.parts import Message
from wire.stream import (
    DEFAULT_MAX_FRAME_BYTES,
    MAX_SMALL_FRAME_BYTES,
    StreamDecoder,
    encode,
    encode_token,
)

MAX = 200
FRAME_STRATEGY = st.one_of(
    st.builds(PrefillRequest, *[st.integers(1, 2**32 - 1)] * 3),
    st.builds(DecodeToken, st.integers(1, 2**64 - 1), st.integers(0, 2**32 - 1)),
    st.builds(Cancel, st.integers(1, 2**64 - 1), st.integers(0, 2**32 - 1)),
)
MESSAGES = st.lists(st.tuples(FRAME_STRATEGY, st.binary(max_size=64)), max_size=6)
# Bytes that look like frames more often than chance would have it.
NEARLY = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda tag, length, body: pack("<II", tag, length) + body,
        st.sampled_from([*FRAMES, 0, 29, 37, 47]),
        st.one_of(st.integers(14, 40), st.integers(0, 2**32 - 1)),
        st.binary(max_size=40),
    ),
    st.tuples(FRAME_STRATEGY, st.binary(max_size=20)).map(lambda m: b"".join(encode(*m))),
)
CUTS = st.lists(st.integers(0, 300), max_size=8).map(sorted)


def read(octets: bytes, cuts: list[int]) -> tuple[list[Message], str | None]:
    """Feed the bytes cut at `cuts`; return the messages and the error, if there was one."""
    decoder = StreamDecoder(max_frame_bytes=MAX)
    messages: list[Message] = []
    edges = [0, *cuts, len(octets)]
    try:
        for start, end in pairwise(edges):
            decoder.receive(octets[start:end])
            while (message := decoder.next_message()) is not None:
                messages.append(message)
            assert decoder.buffered_bytes <= MAX + 8
        decoder.receive_eof()
    except RemoteProtocolError as error:
        return messages, str(error)
    return messages, None


@given(MESSAGES, CUTS)
def test_messages_are_decoded_in_any_chunking(
    messages: list[tuple[Frame, bytes]], cuts: list[int]
) -> None:
    octets = b"".join(b"".join(encode(frame, payload)) for frame, payload in messages)
    decoded, error = read(octets, cuts)
    assert error is None
    assert [(message.frame, bytes(message.body())) for message in decoded] == messages


@given(st.lists(NEARLY, max_size=5).map(b"".join), CUTS)
def test_any_bytes_give_messages_or_one_error_and_chunking_never_matters(
    octets: bytes, cuts: list[int]
) -> None:
    whole = read(octets, [])
    assert read(octets, cuts) == whole
    assert read(octets, list(range(len(octets)))) == whole


@pytest.mark.parametrize(
    ("tag", "length"), [(99, 16), (Tag.CANCEL, 15), (Tag.CANCEL, 0), (Tag.KV_CACHE, 2**32 - 1)]
)
def test_a_bad_prefix_is_refused_before_anything_is_allocated(tag: int, length: int) -> None:
    decoder = StreamDecoder()
    tracemalloc.start()
    try:
        decoder.receive(pack("<II", tag, length))
        with pytest.raises(RemoteProtocolError):
            decoder.next_message()
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()
    assert decoder.buffered_bytes == 0


@pytest.mark.parametrize("tag", FRAMES)
def test_a_large_frame_is_allowed_where_prompts_or_kv_are_and_nowhere_else(tag: Tag) -> None:
    is_large = tag in (Tag.PREFILL_REQUEST, Tag.DECODE_REQUEST, Tag.KV_CACHE)
    limit = DEFAULT_MAX_FRAME_BYTES if is_large else MAX_SMALL_FRAME_BYTES
    decoder = StreamDecoder()
    decoder.receive(pack("<II", tag, limit))
    assert decoder.next_message() is None
    decoder = StreamDecoder()
    decoder.receive(pack("<II", tag, limit + 1))
    with pytest.raises(RemoteProtocolError, match=f"length {limit + 1} is not 16 to {limit}"):
        decoder.next_message()
    decoder = StreamDecoder(max_frame_bytes=100)  # The server's own limit is under both.
    decoder.receive(pack("<II", tag, 101))
    with pytest.raises(RemoteProtocolError, match="16 to 100"):
        decoder.next_message()


def test_after_an_error_nothing_is_kept_and_nothing_is_read() -> None:
    decoder = StreamDecoder()
    decoder.receive(pack("<II", 99, 16))
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="unknown tag 99"):
            decoder.next_message()
        decoder.receive(b"".join(encode(Cancel(1, 12))))
        assert decoder.buffered_bytes == 0
    with pytest.raises(RemoteProtocolError, match="unknown tag 99"):
        decoder.receive_eof()


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_stream_that_ends_inside_a_message_is_an_error(cut: int) -> None:
    octets = b"".join(encode(Cancel(1, 12)))
    assert len(octets) == 24
    decoder = StreamDecoder()
    decoder.receive(octets[:cut])
    assert decoder.next_message() is None
    with pytest.raises(RemoteProtocolError, match="ended inside a message"):
        decoder.receive_eof()


@pytest.mark.parametrize(("request_id", "token_id"), [(1, 0), (2**64 - 1, 2**32 - 1)])
def test_a_token_is_encoded_as_any_frame(request_id: int, token_id: int) -> None:
    [expected] = encode(DecodeToken(request_id, token_id))
    assert encode_token(request_id, token_id) == expected


def test_payload_buffers_are_the_very_objects_passed_in() -> None:
    payload = bytearray(100)
    assert encode(Cancel(1, 12), payload)[1] is payload


def test_a_message_owns_its_payload() -> None:
    decoder = StreamDecoder()
    chunk = bytearray(b"".join(encode(Cancel(1, 12), b"abc")))
    decoder.receive(chunk)
    chunk[:] = bytes(len(chunk))
    message = decoder.next_message()
    assert message is not None and message.payload == (b"abc",)


def test_a_payload_counts_in_bytes_whatever_its_items_are() -> None:
    decoder = StreamDecoder()
    for part in encode(Cancel(1, 12), memoryview(bytes(12)).cast("I")):
        decoder.receive(part)
    message = decoder.next_message()
    assert message is not None and len(message.body()) == 12 and decoder.buffered_bytes == 0
