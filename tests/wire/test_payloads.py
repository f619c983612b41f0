"""The payloads: fixed layouts and maps, bounded, both ways."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from math import inf, nan
from struct import pack
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import payloads
from wire.errors import MAX_SHOWN, LocalProtocolError, RemoteProtocolError
from wire.layout import KVLayout
from wire.options import Options
from wire.payloads import (
    NO_TOKEN,
    STOP,
    Credit,
    Endpoint,
    HelloDetail,
    Load,
    Logprobs,
    Offer,
    PeerDetail,
    PrefillResult,
    Usage,
    decode_continuation,
    decode_map,
    decode_prefill_result,
    decode_prompt,
    encode_continuation,
    encode_prefill_result,
    encode_prompt,
)

LOAD = {"total": 0, "used": 0, "cached": 0, "free": 0}
GROUP = {
    "kind": "kv",
    "num_layers": 1,
    "num_kv_heads": 1,
    "key_dim": 1,
    "value_dim": 1,
    "dtype": "uint8",
}
HELLO: dict[str, Any] = {
    "model": "demo",
    "fingerprint": "f00d",
    "layout": {"groups": [GROUP]},
    "block_size": 16,
    "num_blocks": 4,
    "max_model_len": 64,
    "max_kv_transfer_bytes": 2**63 - 1,
    "arithmetic": "hash",
    "threads": 1,
}
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)
MAPS: list[Any] = [
    KVLayout,
    HelloDetail,
    payloads.WelcomeDetail,
    Load,
    PeerDetail,
    Logprobs,
    payloads.PrefillRest,
    Usage,
    payloads.ErrorDetail,
    Offer,
    list[PeerDetail],
    list[Logprobs | None],
]


@given(TOKENS, st.builds(Options, seed=st.integers(0, 9)))
def test_prompts_come_back_as_they_were(tokens: list[int], options: Options) -> None:
    encoded = encode_prompt(tokens, options)
    assert decode_prompt(encoded, len(tokens)) == (tuple(tokens), options)
    encoded = encode_continuation(tokens, options)
    assert decode_continuation(memoryview(encoded)) == (tuple(tokens), options)


@given(st.binary(max_size=40), st.integers(0, 2**32 - 1) | st.integers(0, 10))
def test_any_bytes_give_a_prompt_or_a_remote_protocol_error(buffer: bytes, seq_len: int) -> None:
    with suppress(RemoteProtocolError):
        decode_prompt(buffer, seq_len)
    with suppress(RemoteProtocolError):
        decode_continuation(buffer)


LOGPROBS = st.builds(
    Logprobs,
    logprob=st.floats(-50, 0),
    top=st.lists(st.tuples(st.integers(0, 99), st.floats(-50, 0)), max_size=3).map(tuple),
)


@given(
    st.builds(
        PrefillResult,
        token_id=st.integers(0, 2**32 - 1),
        cached_tokens=st.integers(0, 2**53 - 1),
        finish_reason=st.sampled_from([None, "length"]),
        logprobs=st.none() | LOGPROBS,
    )
)
def test_a_first_token_comes_back_and_stands_in_front(result: PrefillResult) -> None:
    encoded = encode_prefill_result(result)
    assert encoded[:8] == pack("<q", result.token_id)
    assert decode_prefill_result(memoryview(encoded)) == result


def test_a_plain_first_token_is_8_bytes() -> None:
    assert encode_prefill_result(PrefillResult(token_id=17)) == pack("<q", 17)


@pytest.mark.parametrize("token_id", [2, NO_TOKEN])
def test_a_stop_token_is_no_token_on_the_wire(token_id: int) -> None:
    encoded = encode_prefill_result(PrefillResult(token_id=token_id, finish_reason=STOP))
    assert encoded[:8] == pack("<q", -1)
    assert decode_prefill_result(encoded) == PrefillResult(token_id=NO_TOKEN, finish_reason=STOP)


@pytest.mark.parametrize("token_id", [-1, -7, 2**32, 2**63])
def test_we_send_no_first_token_that_is_none(token_id: int) -> None:
    with pytest.raises(LocalProtocolError, match="no token id"):
        encode_prefill_result(PrefillResult(token_id=token_id))


@given(st.binary(max_size=40))
def test_any_bytes_give_a_first_token_or_a_remote_protocol_error(buffer: bytes) -> None:
    try:
        result = decode_prefill_result(buffer)
    except RemoteProtocolError:
        return
    assert (result.token_id == NO_TOKEN) == (result.finish_reason == STOP)


@given(st.sampled_from(MAPS), st.binary(max_size=60))
def test_any_bytes_give_a_map_or_a_remote_protocol_error(kind: Any, buffer: bytes) -> None:
    try:
        decode_map(kind, buffer)
    except RemoteProtocolError as error:
        assert len(error.message) <= MAX_SHOWN


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize(
    "buffer",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 200_000,
        b"\x81" + b"\x91" * 200_000,
        b"\x81\xa6stored" + b"\x91" * 200_000,
        b"\x81\xd9\xff" + b"\xff" * 255 + b"\x01",
        b"\xc1",
        b"",
    ],
)
def test_hostile_maps_are_refused(kind: Any, buffer: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_map(kind, buffer)


def test_a_vast_array_that_is_not_there_is_not_allocated() -> None:
    """In a process with 256 MiB to spare: four billion announced entries must cost nothing."""
    code = """
import resource
from wire.errors import RemoteProtocolError
from wire.payloads import Load, Logprobs, decode_map
with open("/proc/self/statm") as statm:
    size = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20),) * 2)
for kind, lead in ((Load, b"\\x81\\xa6stored"), (list[Logprobs | None], b"")):
    try:
        decode_map(kind, lead + b"\\xdd\\xff\\xff\\xff\\xff" + b"\\x00" * 64)
    except RemoteProtocolError:
        continue
    raise SystemExit("decoded?")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:5600",
        "tcp://node-3.example.org:65535",
        "tcp://[::1]:1",
        "tcp://[fe80::1%eth0]:5600",
        "ipc:///run/baton/kv.sock",
        "ipc://@abstract",
    ],
)
def test_valid_kv_endpoints(endpoint: str) -> None:
    hello = decode_map(HelloDetail, msgspec.msgpack.encode(HELLO | {"kv_endpoint": endpoint}))
    assert hello.kv_endpoint == endpoint
    about = {"rank": 0, "epoch": 2**64 - 1, "kv_endpoint": endpoint}
    assert decode_map(PeerDetail, msgspec.msgpack.encode(about)).epoch == 2**64 - 1


def test_a_kv_socket_has_every_port_there_is() -> None:
    def is_taken(port: int) -> bool:
        try:
            return bool(msgspec.convert(f"tcp://node-1:{port}", Endpoint))
        except msgspec.ValidationError:
            return False

    assert [port for port in range(100_001) if is_taken(port)] == [*range(1, 65_536)]


def test_only_a_worker_without_a_kv_socket_may_leave_it_out() -> None:
    assert decode_map(HelloDetail, msgspec.msgpack.encode(HELLO | {"kv_endpoint": ""}))
    about = {"rank": 0, "epoch": 1, "kv_endpoint": ""}
    with pytest.raises(RemoteProtocolError, match="kv_endpoint"):
        decode_map(list[PeerDetail], msgspec.msgpack.encode([about]))


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:5600",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:*",
        "tcp://:5600",
        "tcp://eth0;10.0.0.1:5600",
        "tcp://user@host:1",
        "tcp://127.0.0.1:5600\n",
        "tcp://127.0.0.1:5600/path",
        "TCP://127.0.0.1:5600",
        "ipc://",
        "ipc://a b",
        "file:///etc/passwd",
        "tcp://" + "a" * 250 + ":1",
    ],
)
def test_invalid_kv_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(RemoteProtocolError, match="kv_endpoint"):
        decode_map(HelloDetail, msgspec.msgpack.encode(HELLO | {"kv_endpoint": endpoint}))


@pytest.mark.parametrize(
    ("kind", "content", "field"),
    [
        (KVLayout, {"groups": [GROUP | {"num_layers": 0}]}, "num_layers"),
        (Load, {"total": 0, "used": 0, "cached": 0, "free": 0, "stored": [-1]}, "stored"),
        (PeerDetail, {"rank": 2**32 - 2}, "rank"),
        (Usage, {"finish_reason": "stop\n"}, "finish_reason"),
        (Usage, {"finish_reason": "stop", "kv_seconds": nan}, "kv_seconds"),
        (Usage, {"finish_reason": "stop", "kv_seconds": inf}, "kv_seconds"),
        (Usage, {"finish_reason": "stop", "kv_transfer_seconds": 1e9}, "kv_transfer_seconds"),
        (Usage, {"finish_reason": "stop", "kv_bytes": 2**53}, "kv_bytes"),
        (payloads.PrefillRest, {"prompt_logprobs": bytes(983_045)}, "prompt_logprobs"),
        (payloads.ErrorDetail, {"message": "x" * 4097}, "message"),
        (payloads.ErrorDetail, {"message": "", "stage": "router\n"}, "stage"),
        (Logprobs, {"logprob": nan}, "logprob"),
        (Logprobs, {"logprob": 1.0}, "logprob"),
        (Logprobs, {"logprob": -1.0, "top": [[7, -1.0]] * 21}, "top"),
        (Logprobs, {"logprob": -1.0, "top": [[2**32, -1.0]]}, "top"),
        (Load, LOAD | {"stored": [7] * 1025}, "stored"),
        (Load, LOAD | {"evicted": [7] * 1025}, "evicted"),
        (Load, LOAD | {"preemptions": 2**53}, "preemptions"),
        (Load, LOAD | {"host": {"blocks": -1}}, "host.blocks"),
        (Load, LOAD | {"disk": {"bytes": 2**53}}, "disk.bytes"),
        (Load, LOAD | {"disk": {"path": "/kv"}}, "disk"),
        (KVLayout, {"groups": [GROUP | {"dtype": "uint8\n"}]}, "dtype"),
        (HelloDetail, HELLO | {"num_blocks": 2**31}, "num_blocks"),
        (HelloDetail, HELLO | {"max_model_len": 0}, "max_model_len"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(kind: Any, content: Any, field: str) -> None:
    with pytest.raises(RemoteProtocolError, match=field):
        decode_map(kind, msgspec.msgpack.encode(content))


def test_an_offer_shows_neither_its_key_nor_its_prompt() -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8")
    offer = Offer(layout=layout, num_tokens=1, total_bytes=2, token_ids=bytes(4), key=bytes(32))
    assert "x00" not in repr(offer)


def test_an_unknown_key_is_quoted_in_part() -> None:
    with pytest.raises(RemoteProtocolError, match="unknown field `xxx") as caught:
        decode_map(Load, msgspec.msgpack.encode(LOAD | {"x" * 4096: 1}))
    assert len(caught.value.message) == MAX_SHOWN


@given(st.binary(max_size=20))
def test_any_bytes_give_a_credit_or_a_remote_protocol_error(buffer: bytes) -> None:
    try:
        credit = Credit.unpack(buffer)
    except RemoteProtocolError:
        return
    assert credit.pack() == buffer and credit.ready in (0, 1)


@pytest.mark.parametrize(
    ("buffer", "reason"),
    [(bytes(15), "15 bytes"), (bytes(17), "17 bytes"), (pack("<QII", 1, 0, 2), "ready is 2")],
)
def test_an_invalid_credit_is_refused(buffer: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        Credit.unpack(buffer)
