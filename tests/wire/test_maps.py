"""A map says each key once: two readers of a key twice would go by different values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import payloads
from wire.errors import RemoteProtocolError
from wire.maps import check_keys
from wire.options import Options, decode_options
from wire.payloads import (
    Logprobs,
    PrefillResult,
    Usage,
    decode_map,
    decode_prefill_result,
    encode_map,
)

encode = msgspec.msgpack.encode
VALUES = st.recursive(
    st.none() | st.integers(0, 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=60,
)
# One map head for each of msgpack's three widths of a count.
HEADS: dict[str, Callable[[int], bytes]] = {
    "fixmap": lambda count: bytes([0x80 | count]),
    "map 16": lambda count: b"\xde" + count.to_bytes(2, "big"),
    "map 32": lambda count: b"\xdf" + count.to_bytes(4, "big"),
}


def pairs(*items: tuple[str, object], head: str = "fixmap") -> bytes:
    return HEADS[head](len(items)) + b"".join(encode(key) + encode(value) for key, value in items)


@given(VALUES)
def test_a_map_with_distinct_keys_passes(value: object) -> None:
    check_keys(encode(value))


@pytest.mark.parametrize("head", HEADS)
@given(content=st.dictionaries(st.text(), st.integers(-9, 2**63), min_size=1, max_size=14))
def test_a_key_twice_is_refused_whatever_the_head(head: str, content: dict[str, int]) -> None:
    check_keys(pairs(*content.items(), head=head))
    key, value = next(iter(content.items()))
    for again in (value, value + 1):
        with pytest.raises(msgspec.ValidationError, match="twice"):
            check_keys(pairs(*content.items(), (key, again), head=head))


def maps_within(kind: Any) -> Iterator[str]:
    """The keys that hold maps, at any depth."""
    for field in getattr(kind, "fields", ()):
        if "StructType" in repr(field.type):
            yield field.name
            yield from maps_within(field.type)


def test_every_map_within_a_map_is_known() -> None:
    """Of every payload there is: a key that holds a map has to be looked into."""
    for kind in vars(payloads).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            maps = list(maps_within(msgspec.inspect.type_info(kind)))
            # Options are read by `decode_options`, whose vectors have a repeated key within.
            expected = ("structure",) if kind is Options else payloads.NESTED.get(kind, ())
            assert tuple(maps) == expected or kind is PrefillResult, kind


def test_a_key_twice_is_refused_in_payloads_and_options() -> None:
    token = pairs(("logprob", -1.0), ("logprob", -2.0))
    for kind, buffer in [
        (Usage, pairs(("finish_reason", "stop"), ("finish_reason", "length"))),
        (Usage, b"\x82" + pairs(("finish_reason", "stop"))[1:] + encode("stop_logprobs") + token),
        (list[Logprobs | None], b"\x93" + b"\xc0" + encode_map(Logprobs(logprob=-1.0)) + token),
        (list[Logprobs | None], b"\xdc\x00\x01" + token),
        (list[Logprobs | None], b"\xdd\x00\x00\x00\x01" + token),
    ]:
        with pytest.raises(RemoteProtocolError, match="twice"):
            decode_map(kind, buffer)
    with pytest.raises(RemoteProtocolError, match="twice"):
        decode_prefill_result(bytes(8) + b"\x81" + encode("logprobs") + token)
    with pytest.raises(RemoteProtocolError, match="twice"):
        decode_options(pairs(("max_tokens", 2), ("max_tokens", 2)))
    assert decode_options(pairs(("max_tokens", 2))) == Options(max_tokens=2)


@pytest.mark.parametrize("count", [1, 15, 16, 70_000])
def test_each_map_of_an_array_is_looked_at(count: int) -> None:
    twice = b"\x82\xa1a\x01\xa1a\x02"
    head = msgspec.msgpack.encode([None] * count)[:-count]
    with pytest.raises(msgspec.ValidationError, match="twice"):
        check_keys(head + (count - 1) * b"\x80" + twice)
