"""Options: typed, bounded, every field optional, the error names the field."""

from __future__ import annotations

from struct import pack
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import ErrorCode, RemoteProtocolError
from wire.options import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_SEQUENCE_LENGTH,
    MAX_BAD_SEQUENCES,
    MAX_LOGIT_BIASES,
    MAX_OPTIONS_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_STRUCTURE_LENGTH,
    Options,
    Structure,
    decode_options,
    encode_options,
)

TOKEN_IDS = st.integers(0, 2**31 - 1)


def test_no_bytes_mean_every_default_and_the_other_way_round() -> None:
    assert decode_options(b"") == Options()
    assert encode_options(Options()) == b""
    assert Options().temperature == 0.0, "greedy"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.integers(0, 2**31 - 1),
            "min_p": st.floats(0, 1),
            "seed": st.integers(0, 2**63 - 1),
            "max_tokens": st.none() | st.integers(1, 2**31 - 1),
            "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=256).map(tuple),
            "ignore_eos": st.booleans(),
            "logprobs": st.none() | st.integers(0, 20),
            "repetition_penalty": st.floats(0.01, 100),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "logit_bias": st.lists(
                st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 100)), max_size=1024
            ).map(tuple),
            "structure": st.none()
            | st.builds(
                Structure,
                kind=st.sampled_from(["json_schema", "regex", "lark"]),
                text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=100),
            ),
            "allowed_token_ids": st.lists(TOKEN_IDS, max_size=20).map(tuple),
            "bad_sequences": st.lists(
                st.lists(TOKEN_IDS, min_size=1, max_size=64).map(tuple), max_size=9
            ).map(tuple),
            "prompt_logprobs": st.none() | st.integers(0, 20),
            "priority": st.integers(-100, 100),
            "deadline_ms": st.none() | st.integers(1, 2**31 - 1),
            "tenant": st.integers(0, 2**63 - 1),
            "cache_salt": st.text(st.characters(exclude_categories=["Cs"]), max_size=128),
        },
    )
)
def test_options_come_back_as_they_were_behind_the_shortest_head(fields: dict[str, Any]) -> None:
    options = Options(**fields)
    encoded = encode_options(options)
    assert decode_options(memoryview(encoded)) == options
    count = len(msgspec.msgpack.decode(encoded)) if encoded else 0
    head = b"" if count == 0 else bytes([0x80 | count]) if count < 16 else bytes([0xDE, 0, count])
    assert encoded[: len(head)] == head


@given(st.binary(max_size=200))
def test_any_bytes_give_options_or_a_remote_protocol_error(buffer: bytes) -> None:
    try:
        decode_options(buffer)
    except RemoteProtocolError as error:
        assert error.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0.0),
        ("top_k", -1),
        ("top_k", 2**31),
        ("min_p", 1.5),
        ("seed", 2**64 - 1),
        ("choice", 65536),
        ("max_tokens", 0),
        ("stop_token_ids", [0] * 257),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("logit_bias", [[5, 101]]),
        ("logit_bias", [[-1, 0]]),
        ("logit_bias", [[5, 1]] * 1025),
        ("cache_salt", "a" * 129),
        ("cache_salt", b"a"),
        ("structure", {"kind": "regex", "text": ""}),
        ("structure", {"kind": "regex", "text": "a" * (MAX_STRUCTURE_LENGTH + 1)}),
        ("structure", {"kind": "regex", "text": "a", "strict": True}),
        ("allowed_token_ids", [1] * (MAX_ALLOWED_TOKEN_IDS + 1)),
        ("bad_sequences", [[1] * (MAX_BAD_SEQUENCE_LENGTH + 1)]),
        ("bad_sequences", [[1]] * (MAX_BAD_SEQUENCES + 1)),
        ("prompt_logprobs", 21),
        ("logprobs", 21),
        ("priority", 101),
        ("deadline_ms", 0),
        ("temperature", "hot"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError, match=field) as caught:
        decode_options(msgspec.msgpack.encode({field: value}))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "buffer",
    [
        b"\x90",
        b"\x80\x80",
        b"\x81\xa4beer\x01",
        b"\x81\xaestop_token_ids\xdd\xff\xff\xff\xff",
        b"\x91" * 60_000,
        b"\x81\xa4seed" + b"\x91" * 60_000,
        b"\x81\xa4seed\xcf" + pack(">Q", 2**64 - 1),
        b"\x81\xa4\xff\xff\xff\xff\x01",
        bytes(MAX_OPTIONS_BYTES + 1),
    ],
    ids=["array", "trailing", "unknown", "vast", "nest", "nest in", "u64", "utf-8", "long"],
)
def test_hostile_maps_are_refused(buffer: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_options(buffer)


def test_every_option_at_its_limit_fits_in_one_map() -> None:
    last = 2**31 - 1
    options = Options(
        structure=Structure(kind="json_schema", text="x" * MAX_STRUCTURE_LENGTH),
        allowed_token_ids=(last,) * MAX_ALLOWED_TOKEN_IDS,
        bad_sequences=((last,) * MAX_BAD_SEQUENCE_LENGTH,) * MAX_BAD_SEQUENCES,
        logit_bias=((last, 0.1),) * MAX_LOGIT_BIASES,
        stop_token_ids=(last,) * MAX_STOP_TOKEN_IDS,
    )
    assert decode_options(encode_options(options)) == options
