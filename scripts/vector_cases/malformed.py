"""Bytes that must be refused, and why."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

from scripts.vector_cases.given import FULL, LAYOUT, REQUEST, STATE
from wire import parts
from wire.frames import DecodeToken
from wire.payloads import Offer, encode_map


def malformed() -> list[dict[str, Any]]:
    """Bytes that must be refused with RemoteProtocolError, and why."""
    token = parts.encode(DecodeToken(REQUEST, 19))
    one = bytes(token[1])

    def tcp(tag: int, body: bytes, length: int | None = None) -> str:
        return (struct.pack("<II", tag, len(body) if length is None else length) + body).hex()

    def zmq(*pieces: bytes) -> list[str]:
        return [piece.hex() for piece in pieces]

    def u32(value: int) -> bytes:
        return struct.pack("<I", value)

    def payload(kind: str, wire: bytes, why: str) -> dict[str, Any]:
        return {"payload": kind, "wire": wire.hex(), "why": why}

    def peers(endpoint: str) -> bytes:
        return msgspec.msgpack.encode([{"rank": 3, "epoch": 1, "kv_endpoint": endpoint}])

    short_key = encode_map(
        Offer(layout=LAYOUT, num_tokens=1, total_bytes=16, token_ids=u32(1), key=bytes(31))
    )
    cases: list[dict[str, Any]] = [
        {"zmq": zmq(u32(44)), "why": "no header part"},
        {"zmq": zmq(b"\x2c\x00", bytes(16)), "why": "the tag is not 4 bytes"},
        {"zmq": zmq(u32(44), bytes(15)), "why": "the header is not 16 bytes"},
        {"zmq": zmq(u32(44), bytes(32)), "why": "two headers, and it is not DECODE_TOKEN"},
        {"zmq": zmq(u32(35), one * 2 + b"\x00"), "why": "headers and a stray byte"},
        {"zmq": zmq(u32(37), bytes(16)), "why": "unknown tag 37"},
        {"zmq": zmq(u32(0), bytes(16)), "why": "unknown tag 0"},
        {"zmq": zmq(u32(34), struct.pack("<QII", 1, 1, 1)), "why": "reserved field not zero"},
        {"zmq": zmq(u32(35), struct.pack("<Qq", 1, -1)), "why": "a token id below zero"},
        {"zmq": zmq(u32(36), struct.pack("<Qq", 1, 5)), "why": "DECODE_DONE without -1"},
        {"zmq": zmq(u32(44), struct.pack("<QII", 0, 12, 0)), "why": "request_id 0 in CANCEL"},
        {"zmq": zmq(u32(35), one + struct.pack("<Qq", 0, 5)), "why": "request_id 0 in a step"},
        {"zmq": zmq(u32(40), struct.pack("<QIBBH", 1, 0, 9, 1, 0)), "why": "no such role"},
        {"zmq": zmq(u32(40), struct.pack("<QIBBH", 1, 0, 0, 1, 7)), "why": "reserved field"},
        {"tcp": tcp(44, bytes(16), 15), "why": "length below a header"},
        {"tcp": tcp(44, b"", 2**32 - 1), "why": "length over the limit, known from 8 bytes"},
        {"tcp": tcp(30, b"", 8 * 2**20 + 1), "why": "length over 8 MiB"},
        {"tcp": tcp(36, b"", 2**20 + 1), "why": "length over 1 MiB for a small frame"},
        {"tcp": tcp(47, b"", 16), "why": "unknown tag 47, known from 8 bytes"},
        {"tcp": tcp(46, struct.pack("<QII", 1, 1, 1)), "why": "reserved field not zero"},
        {"tcp": tcp(30, struct.pack("<QII", 0, 0, 2**32 - 1)), "why": "request_id 0"},
        payload("prompt:2", u32(11), "fewer token ids than seq_len"),
        payload("prompt:1", u32(11) + b"\x90", "options are no map"),
        payload("prompt:1", u32(11) + b"\x81\xa4temp\x00", "unknown option"),
        payload("prompt:1", u32(11) + b"\x81\xa5top_k\xff", "option out of range"),
        payload(
            "prompt:1",
            u32(11) + b"\x81\xaalogit_bias\x91\x92\x05\x65",
            "a bias over 100",
        ),
        payload(
            "prompt:1",
            u32(11) + b"\x81\xadbad_sequences\x91\x90",
            "a bad sequence of no token",
        ),
        payload(
            "prompt:1",
            u32(11) + b"\x81\xa9structure\x82\xa4kind\xa3xml\xa4text\xa1a",
            "a structure of no known kind",
        ),
        payload(
            "prompt:1",
            u32(11) + b"\x81\xa9structure\x83\xa4kind\xa5regex\xa4text\xa1a\xa4text\xa1b",
            "a key of the structure twice",
        ),
        payload("prompt:1", u32(11) + b"\x80\x00", "bytes after the options"),
        payload("prompt:1", u32(11) + b"\x82\xa4seed\x01\xa4seed\x01", "an option twice"),
        payload("continuation", b"\x00", "payload below 4 bytes"),
        payload("continuation", u32(2) + u32(11), "fewer token ids than the count"),
        payload("PrefillResult", bytes(7), "no i64"),
        payload("PrefillResult", struct.pack("<q", -1), "no token, and no reason to stop"),
        payload("PrefillResult", struct.pack("<q", -2), "token id below -1"),
        payload(
            "PrefillResult",
            struct.pack("<q", 5) + b"\x81\xafprompt_logprobs\xc4\x03\x00\x00\x00",
            "prompt_logprobs without its number of tops",
        ),
        payload(
            "PrefillResult",
            struct.pack("<q", 5) + b"\x81\xafprompt_logprobs\xc4\x0c" + u32(1) + bytes(8),
            "prompt_logprobs ends within a row",
        ),
        payload(
            "PrefillResult",
            struct.pack("<q", 5) + b"\x81\xadfinish_reason\xa4stop",
            "a stop token is no token",
        ),
        payload("Credit", bytes(15), "not 16 bytes"),
        payload("Credit", struct.pack("<QIBBH", 1, 0, 2, 0, 0), "ready is neither 0 nor 1"),
        payload("Credit", struct.pack("<QIBBH", 1, 0, 0, 2, 0), "in_memory is neither 0 nor 1"),
        payload("segment", bytes(47), "no descriptor"),
        payload("segment", struct.pack("<IIIIQQQ", 0, 2, 0, 3, 48, 0, 0), "that of version 1"),
        payload(
            "segment",
            struct.pack("<HHHHIIIIQQQ", 0, 0, 1, 2, 0, 1, 0, 1, 0, 0, 0),
            "in_memory is neither 0 nor 1, in a segment",
        ),
        *layouts(payload),
        payload("Offer", b"\x80", "required fields are missing"),
        payload("Offer", short_key, "a key of 31 bytes"),
        payload("Usage", b"\x81\xadfinish_reason\x01", "wrong type"),
        payload("Usage", b"\x82\xadfinish_reason\xa4stop\xadfinish_reason\xa4stop", "a key twice"),
        payload(
            "Logprobs[]",
            b"\x91\x82" + (b"\xa7logprob\xcb" + struct.pack(">d", -1.0)) * 2,
            "a key twice in a map of an array",
        ),
        payload("ErrorDetail", b"\xc1", "no msgpack at all"),
        payload("ErrorDetail", b"\x82\xa7message\xa0\xa5stage\xa6engine", "a stage there is not"),
        payload("PeerDetail[]", peers("tcp://a:65536"), "a port over 65535"),
        payload("PeerDetail[]", peers(""), "no endpoint"),
        payload("Load", b"\xdd\xff\xff\xff\xff", "an array of four billion that is not there"),
        payload("Logprobs[]", b"\x91\x01", "no map and no nil"),
    ]
    return [{"name": _malformed_name(case), **case} for case in cases]


def _malformed_name(case: dict[str, Any]) -> str:
    where = "zmq" if "zmq" in case else "tcp" if "tcp" in case else case["payload"]
    return f"{where}: {case['why']}"


def layouts(payload: Callable[[str, bytes, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Invalid layouts."""
    full, state = msgspec.to_builtins(FULL), msgspec.to_builtins(STATE)
    cases: list[tuple[Any, str]] = [
        ({"num_layers": 2, "num_kv_heads": 1, "head_dim": 4, "dtype": "uint8"}, "of version 1"),
        ({"groups": []}, "no groups"),
        ({"groups": [full] * 17}, "17 groups"),
        ({"groups": [{**full, "kind": "latent"}]}, "a group of no known kind"),
        ({"groups": [full | {"window": 0}]}, "a window of no position"),
        ({"groups": [full | {"dtype": "fp8"}]}, "no known dtype"),
        ({"groups": [full | {"key_dim": 0}]}, "keys of no size"),
        ({"groups": [full | {"head_bytes": 4}]}, "a key of another kind of group"),
        ({"groups": [state | {"window": 3}]}, "a state with a window"),
        (
            {"groups": [state | {"num_heads": 2, "head_bytes": (2 << 20) + 1}]},
            "a layer of a state over 4 MiB",
        ),
        (
            {"groups": [full | {"num_kv_heads": 1024, "key_dim": 4095}]},
            "a layer of a token over 4 MiB",
        ),
    ]
    twice = encode_map(STATE)
    twice = bytes([twice[0] + 1]) + twice[1:] + b"\xaanum_layers\x02"
    return [
        *(payload("KVLayout", msgspec.msgpack.encode(content), why) for content, why in cases),
        payload("KVLayout", b"\x81\xa6groups\x91" + twice, "a key of a group twice"),
    ]
