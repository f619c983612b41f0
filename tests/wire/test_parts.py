"""The ZeroMQ envelope."""

from __future__ import annotations

from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.frames import Cancel, DecodeToken, KvCache, Tag
from wire.parts import MAX_HEADERS, Message, decode, encode

TOKENS = st.lists(
    st.builds(DecodeToken, st.integers(1, 2**64 - 1), st.integers(0, 2**32 - 1)),
    min_size=1,
    max_size=9,
)


def test_payload_parts_are_the_very_objects_passed_in() -> None:
    descriptor, kv = b"descriptor", bytearray(1 << 17)
    parts = encode(KvCache(1, 2, 3), descriptor, kv)
    assert parts[2] is descriptor and parts[3] is kv
    message = decode(parts)
    assert message.payload[1] is kv
    assert message == Message(KvCache(1, 2, 3), (descriptor, kv))


@given(TOKENS, st.lists(st.binary(max_size=8), max_size=3))
def test_one_message_holds_every_token_of_a_step(
    tokens: list[DecodeToken], payload: list[bytes]
) -> None:
    message = decode(encode(tokens, *payload))
    assert [DecodeToken(*each) for each in message.tokens] == tokens
    assert message.tag is Tag.DECODE_TOKEN
    assert message.frame == tokens[0]
    assert message.body() == b"".join(payload)


HEADERS = st.integers(0, 3).flatmap(lambda n: st.binary(min_size=16 * n, max_size=16 * n))
NEAR_MISSES = st.tuples(st.sampled_from(list(Tag)).map(lambda tag: pack("<I", tag)), HEADERS)


@given(st.lists(st.binary(max_size=64), max_size=4) | NEAR_MISSES.map(list))
def test_any_parts_give_a_message_or_a_remote_protocol_error(parts: list[bytes]) -> None:
    try:
        message = decode(parts)
    except RemoteProtocolError:
        return
    frames = [DecodeToken(*each) for each in message.tokens] or message.frame
    assert encode(frames, *message.payload) == parts


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "at least 2 parts"),
        ([pack("<I", 44)], "at least 2 parts"),
        ([b"\x2c", bytes(16)], "tag part has 1 bytes"),
        ([pack("<I", 44), b""], "not n x 16"),
        ([pack("<I", 44), bytes(24)], "not n x 16"),
        ([pack("<I", 44), bytes(32)], "only DECODE_TOKEN may"),
        ([pack("<I", 99), bytes(16)], "unknown tag 99"),
        ([pack("<I", 35), bytes(16 * (MAX_HEADERS + 1))], "not n x 16"),
        ([pack("<I", 35), pack("<QqQq", 1, 5, 0, 5)], "request_id is 0, not 1 to"),
        ([pack("<I", 35), pack("<QqQq", 1, 5, 1, -7)], "token_id -7 is no u32"),
        ([pack("<I", 35), pack("<QqQq", 1, 5, 1, 2**32)], "token_id 4294967296 is no u32"),
    ],
)
def test_an_invalid_message_is_refused(parts: list[bytes], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decode(parts)


@pytest.mark.parametrize(
    "frames",
    [[], [Cancel(1, 12), Cancel(2, 12)], [DecodeToken(1, 1), Cancel(1, 12)]],
    ids=["none", "two", "mixed"],
)
def test_an_invalid_message_of_ours_is_a_local_error(frames: list[DecodeToken]) -> None:
    with pytest.raises(LocalProtocolError):
        encode(frames)


def test_the_body_of_several_parts_is_joined() -> None:
    assert Message(Cancel(1, 12), (b"a", b"b")).body() == b"ab"
    assert Message(Cancel(1, 12)).body() == b""
