#!/usr/bin/env python3
"""Write wire/vectors.json, the protocol's test vectors; with --check, compare instead.

Every byte comes from `wire`; the tests read the file as data, so a change of the code that changes
a byte on the wire shows up as a difference in this file, never silently.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from wire import parts, stream
from wire.errors import ErrorCode, TransferFailed
from wire.frames import (
    ANY_RANK,
    AS_MANY_AS_FIT,
    NO_RANK,
    VERSION,
    Cancel,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Drain,
    Error,
    Frame,
    Heartbeat,
    Hello,
    KvCache,
    KvCacheAck,
    Peers,
    PrefillDone,
    PrefillRequest,
    Role,
    Welcome,
)
from wire.layout import KVGroup, KVLayout, StateGroup
from wire.logprobs import join_prompt_logprobs, pack_logprobs, unpack_prompt_logprobs
from wire.options import Options, Structure
from wire.payloads import (
    Credit,
    ErrorDetail,
    HelloDetail,
    Load,
    Logprobs,
    Offer,
    PeerDetail,
    PrefillResult,
    Usage,
    WelcomeDetail,
    encode_continuation,
    encode_map,
    encode_prefill_result,
    encode_prompt,
)
from wire.prefix import prefix_hashes
from wire.process.model import fingerprint
from wire.session import Direction
from wire.transfer import (
    KVReceiver,
    KVSender,
    Rectangle,
    Sealing,
    Segment,
    SegmentDescriptor,
    pack_places,
    segment_digest,
    unasked_segments,
)

PATH = Path(__file__).resolve().parent.parent / "wire" / "vectors.json"
# Router epoch 1 in the high half, the first attempt in the low half.
REQUEST = 1 << 32 | 1
EPOCH = 1_760_000_000_000_000_000 >> 20 << 20
MEMORY = "baton-8d0c5f2e"
# A key that everybody knows protects nothing: this one is for the vectors only.
KEY, TOKEN, SEGMENT_PORT = bytes(range(32)), bytes(range(32, 64)), 5601
LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="uint8")
_FULL = KVGroup(num_layers=1, num_kv_heads=2, key_dim=4, value_dim=2, dtype="uint8")
_WINDOWED = msgspec.structs.replace(_FULL, num_layers=2, window=3)
_STATE = StateGroup(num_layers=2, num_heads=4, head_bytes=3)
WINDOWS = KVLayout(groups=(_FULL, _WINDOWED))
STATES = KVLayout(groups=(_STATE, _FULL))
EVERY_KIND = KVLayout(groups=(_FULL, _WINDOWED, _STATE))


def frame(
    name: str,
    headers: Frame | Sequence[Frame],
    payload: Sequence[bytes] = (),
    *,
    kind: str = "none",
    content: Any = None,
) -> dict[str, Any]:
    """One frame on both envelopes; several headers exist on ZeroMQ only."""
    frames = [headers] if isinstance(headers, Frame) else list(headers)
    vector = {
        "name": name,
        "tag": frames[0].tag.name,
        "headers": [asdict(one) for one in frames],
        "payload": kind,
        "content": content,
        "zmq": [bytes(part).hex() for part in parts.encode(frames, *payload)],
    }
    if len(frames) == 1:
        vector["tcp"] = b"".join(stream.encode(frames[0], *payload)).hex()
    return vector


def mapped(name: str, header: Frame, content: msgspec.Struct | Sequence[Any]) -> dict[str, Any]:
    """A frame whose payload is one msgpack map, or a list of them."""
    one = content[0] if isinstance(content, Sequence) else content
    kind = type(one).__name__ + ("[]" if isinstance(content, Sequence) else "")
    return frame(
        name, header, [encode_map(content)], kind=kind, content=msgspec.to_builtins(content)
    )


def prompt(name: str, rank: int, token_ids: list[int], options: Options) -> dict[str, Any]:
    return frame(
        name,
        PrefillRequest(REQUEST, len(token_ids), rank),
        [encode_prompt(token_ids, options)],
        kind="prompt",
        content={"token_ids": token_ids, "options": msgspec.to_builtins(options)},
    )


def continuation(
    name: str, token_ids: list[int], options: Options, max_new_tokens: int = 16
) -> dict[str, Any]:
    payload = [encode_continuation(token_ids, options)] if token_ids else []
    return frame(
        name,
        DecodeRequest(REQUEST, max_new_tokens),
        payload,
        kind="continuation",
        content={"token_ids": token_ids, "options": msgspec.to_builtins(options)},
    )


def prefill_done(name: str, kv_bytes: int, result: PrefillResult) -> dict[str, Any]:
    return frame(
        name,
        PrefillDone(REQUEST, kv_bytes),
        [encode_prefill_result(result)],
        kind="PrefillResult",
        content=told(result),
    )


def told(result: PrefillResult) -> dict[str, Any]:
    """A first token as JSON, the rows of the prompt as maps."""
    content: dict[str, Any] = msgspec.to_builtins(result)
    if result.prompt_logprobs is not None:
        rows = unpack_prompt_logprobs(result.prompt_logprobs)
        content["prompt_logprobs"] = msgspec.to_builtins(rows)
    return content


def segment(name: str, rectangle: Rectangle, kv: bytes, idle_us: int = 0) -> dict[str, Any]:
    """A segment of KV."""
    digest = segment_digest(REQUEST, kv)
    descriptor = SegmentDescriptor.of(rectangle, len(kv), digest, idle_us)
    return frame(
        name,
        KvCache(REQUEST, 1, 1),
        [descriptor.pack(), kv],
        kind="segment",
        content={**descriptor._asdict(), "digest": f"{digest:016x}", "kv": kv.hex()},
    )


def sealed_segment(rectangle: Rectangle, kv: bytes) -> dict[str, Any]:
    """A segment as it comes, sealed, to the segment port."""
    descriptor = SegmentDescriptor.of(rectangle, len(kv), 0, 1500)
    header = KvCache(REQUEST, 1, 1)
    sealed = Sealing(KEY).seal(header, descriptor, kv)
    content = {**descriptor._asdict(), "digest": f"{0:016x}", "kv": sealed.hex()}
    return frame(
        "kv_cache_segment_sealed",
        header,
        [descriptor.pack(), sealed],
        kind="segment",
        content=content,
    )


def segment_in_memory(rectangle: Rectangle, pieces: dict[int, bytes]) -> dict[str, Any]:
    """A segment whose pieces lie in memory, by their places."""
    kv = b"".join(pieces.values())
    digest = segment_digest(REQUEST, kv)
    descriptor = SegmentDescriptor.of(rectangle, len(kv), digest, in_memory=1)
    return frame(
        "kv_cache_segment_in_memory",
        KvCache(REQUEST, 1, 1),
        [descriptor.pack(), pack_places(list(pieces))],
        kind="segment",
        content={**descriptor._asdict(), "digest": f"{digest:016x}", "places": list(pieces)},
    )


def data_plane() -> list[dict[str, Any]]:
    every_option = Options(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((5, -100.0), (6, 2.5)),
        structure=Structure(kind="regex", text="[0-9]+"),
        allowed_token_ids=(5, 6, 7),
        bad_sequences=((5,), (6, 7)),
        seed=7,
        choice=1,
        max_tokens=64,
        min_tokens=2,
        stop_token_ids=(2, 3),
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=0,
        priority=-1,
        deadline_ms=30_000,
    )
    likeliest = Logprobs(logprob=-0.5, top=((17, -0.5), (4, -1.25)))
    rows = [likeliest, Logprobs(logprob=-2.0, top=((9, -0.25), (3, -2.0)))]
    offer = Offer(
        layout=LAYOUT,
        num_tokens=3,
        total_bytes=3 * LAYOUT.token_bytes,
        token_ids=struct.pack("<3I", 11, 12, 13),
    )
    all_rows = Rectangle(0, range(2), range(1), range(3))
    two_blocks = Rectangle(0, range(2), range(1), range(4))
    share = Rectangle(1, range(1, 2), range(1, 2), range(3, 5))
    state = Rectangle(2, range(2), range(2, 4), range(5, 5))
    credit = Credit(48, 0, 0)
    return [
        prompt("prefill_request", 3, [11, 12, 13], Options()),
        prompt("prefill_request_any_rank", ANY_RANK, [11, 12, 13], Options(max_tokens=17)),
        prompt("prefill_request_no_rank", NO_RANK, [4294967295], Options(max_tokens=1)),
        prompt("prefill_request_every_option", 0, [1], every_option),
        prefill_done("prefill_done", 48, PrefillResult(token_id=17)),
        prefill_done(
            "prefill_done_more",
            48,
            PrefillResult(token_id=17, cached_tokens=2, logprobs=likeliest),
        ),
        prefill_done(
            "prefill_done_prompt_logprobs",
            48,
            PrefillResult(
                token_id=17, prompt_logprobs=join_prompt_logprobs(2, map(pack_logprobs, rows))
            ),
        ),
        prefill_done("prefill_done_stop", 0, PrefillResult(token_id=-1, finish_reason="stop")),
        prefill_done("prefill_done_last", 0, PrefillResult(token_id=17, finish_reason="length")),
        frame(
            "kv_cache_offer",
            KvCache(REQUEST, 0, 0),
            [encode_map(offer)],
            kind="Offer",
            content={
                "layout": msgspec.to_builtins(LAYOUT),
                "num_tokens": 3,
                "total_bytes": offer.total_bytes,
                "token_ids": [11, 12, 13],
            },
        ),
        frame(
            "kv_cache_offer_memory",
            KvCache(REQUEST, 0, 0),
            [encode_map(msgspec.structs.replace(offer, memory=MEMORY))],
            kind="Offer",
            content={
                "layout": msgspec.to_builtins(LAYOUT),
                "num_tokens": 3,
                "total_bytes": offer.total_bytes,
                "token_ids": [11, 12, 13],
                "memory": MEMORY,
            },
        ),
        frame(
            "kv_cache_offer_sealing",
            KvCache(REQUEST, 0, 0),
            [encode_map(msgspec.structs.replace(offer, key=KEY, token=TOKEN))],
            kind="Offer",
            content={
                "layout": msgspec.to_builtins(LAYOUT),
                "num_tokens": 3,
                "total_bytes": offer.total_bytes,
                "token_ids": [11, 12, 13],
                "key": KEY.hex(),
                "token": TOKEN.hex(),
            },
        ),
        frame("kv_cache_keepalive", KvCache(REQUEST, 0, 0)),
        segment("kv_cache_segment", all_rows, bytes(range(48)), 1500),
        segment("kv_cache_segment_heads", share, bytes(range(12))),
        segment("kv_cache_segment_state", state, bytes(range(12))),
        sealed_segment(all_rows, bytes(range(48))),
        segment_in_memory(two_blocks, {96: bytes(range(32)), 32: bytes(range(32, 64))}),
        *(
            frame(
                name,
                KvCacheAck(REQUEST, kv_bytes),
                [ack.pack()],
                kind="Credit",
                content=ack._asdict(),
            )
            for name, kv_bytes, ack in (
                ("kv_cache_ack_waiting", 0, Credit(0, 0, 0)),
                ("kv_cache_ack", 0, credit),
                ("kv_cache_ack_ready", 48, Credit(48, 0, 1)),
                ("kv_cache_ack_in_memory", 0, Credit(48, 0, 0, 1)),
                ("kv_cache_ack_segment_port", 0, Credit(48, 0, 0, 0, SEGMENT_PORT)),
            )
        ),
        continuation("decode_request", [11, 12, 13, 17], Options(max_tokens=17)),
        continuation("decode_request_bare", [], Options()),
        continuation("decode_request_as_many_as_fit", [], Options(), AS_MANY_AS_FIT),
        frame("decode_token", DecodeToken(REQUEST, 19)),
        frame(
            "decode_token_step",
            [DecodeToken(REQUEST, 19), DecodeToken(REQUEST + 1, 2**31), DecodeToken(REQUEST, 5)],
        ),
        frame(
            "decode_token_logprobs",
            [DecodeToken(REQUEST, 17), DecodeToken(REQUEST + 1, 5)],
            [encode_map([likeliest, None])],
            kind="Logprobs[]",
            content=[msgspec.to_builtins(likeliest), None],
        ),
        mapped("decode_done", DecodeDone(REQUEST), Usage(finish_reason="stop")),
        mapped(
            "decode_done_usage",
            DecodeDone(REQUEST),
            Usage(
                finish_reason="length",
                completion_tokens=17,
                kv_bytes=48,
                kv_skipped_tokens=2,
                kv_seconds=0.25,
                kv_transfer_seconds=0.125,
            ),
        ),
        mapped(
            "decode_done_stop", DecodeDone(REQUEST), Usage(finish_reason="stop", stop_token_id=2)
        ),
    ]


def control_plane() -> list[dict[str, Any]]:
    detail = HelloDetail(
        model="demo",
        fingerprint="0123456789abcdef",
        layout=LAYOUT,
        block_size=16,
        num_blocks=512,
        max_model_len=2048,
        max_kv_transfer_bytes=1 << 30,
        arithmetic="cpu sapphirerapids-5a1b0c bfloat16",
        threads=4,
        kv_endpoint="tcp://127.0.0.1:5600",
        cores="0-3",
        kv_unasked_bytes=2 << 20,
    )
    hashes = prefix_hashes([1, 2, 3, 4], 2)
    load = Load(total=512, used=3, cached=5, free=504, kv_inflight_bytes=48, stored=tuple(hashes))
    peer = PeerDetail(
        rank=3,
        epoch=EPOCH,
        kv_endpoint=detail.kv_endpoint,
        block_size=16,
        kv_unasked_bytes=detail.kv_unasked_bytes,
    )
    return [
        mapped("hello", Hello(EPOCH, 3, Role.DECODE), detail),
        mapped(
            "hello_every_kind",
            Hello(EPOCH, 3, Role.DECODE),
            msgspec.structs.replace(detail, layout=EVERY_KIND),
        ),
        frame(
            "hello_client",
            Hello.of_client(),
            [b"sk-0123456789abcdef"],
            kind="api_key",
            content="sk-0123456789abcdef",
        ),
        mapped(
            "welcome", Welcome(EPOCH, 1000, 30_000), WelcomeDetail(max_kv_transfer_bytes=1 << 30)
        ),
        mapped("heartbeat", Heartbeat(1234, 2, 1), load),
        frame("heartbeat_router", Heartbeat(0, 2, 0)),
        mapped("peers", Peers(EPOCH, 1), [peer]),
        frame("cancel", Cancel(REQUEST, ErrorCode.CANCELLED)),
        mapped(
            "error",
            Error(REQUEST, ErrorCode.KV_TRANSFER_TOO_LARGE),
            ErrorDetail(message="the KV cache of this prompt is too large", stage="router"),
        ),
        mapped(
            "error_connection",
            Error(0, ErrorCode.UNKNOWN_PEER),
            ErrorDetail(message="say HELLO first"),
        ),
        frame("error_bare", Error(REQUEST, ErrorCode.INTERNAL)),
        frame("drain", Drain(EPOCH, 30_000)),
    ]


def malformed() -> list[dict[str, Any]]:
    """Bytes that must be refused with RemoteProtocolError, and why."""
    token = parts.encode(DecodeToken(REQUEST, 19))
    two = bytes(token[1]) * 2

    def tcp(tag: int, body: bytes, length: int | None = None) -> str:
        return (struct.pack("<II", tag, len(body) if length is None else length) + body).hex()

    def zmq(*pieces: bytes) -> list[str]:
        return [piece.hex() for piece in pieces]

    def u32(value: int) -> bytes:
        return struct.pack("<I", value)

    def payload(kind: str, wire: bytes, why: str) -> dict[str, Any]:
        return {"payload": kind, "wire": wire.hex(), "why": why}

    short_key = encode_map(
        Offer(layout=LAYOUT, num_tokens=1, total_bytes=16, token_ids=u32(1), key=bytes(31))
    )
    cases: list[dict[str, Any]] = [
        {"zmq": zmq(u32(44)), "why": "no header part"},
        {"zmq": zmq(b"\x2c\x00", bytes(16)), "why": "the tag is not 4 bytes"},
        {"zmq": zmq(u32(44), bytes(15)), "why": "the header is not 16 bytes"},
        {"zmq": zmq(u32(44), bytes(32)), "why": "two headers, and it is not DECODE_TOKEN"},
        {"zmq": zmq(u32(35), two + b"\x00"), "why": "headers and a stray byte"},
        {"zmq": zmq(u32(37), bytes(16)), "why": "unknown tag 37"},
        {"zmq": zmq(u32(0), bytes(16)), "why": "unknown tag 0"},
        {"zmq": zmq(u32(34), struct.pack("<QII", 1, 1, 1)), "why": "reserved field not zero"},
        {"zmq": zmq(u32(35), struct.pack("<Qq", 1, -1)), "why": "a token id below zero"},
        {"zmq": zmq(u32(36), struct.pack("<Qq", 1, 5)), "why": "DECODE_DONE without -1"},
        {"zmq": zmq(u32(40), struct.pack("<QIBBH", 1, 0, 9, 1, 0)), "why": "no such role"},
        {"zmq": zmq(u32(40), struct.pack("<QIBBH", 1, 0, 0, 1, 7)), "why": "reserved field"},
        {"tcp": tcp(44, bytes(16), 15), "why": "length below a header"},
        {"tcp": tcp(44, b"", 2**32 - 1), "why": "length over the limit, known from 8 bytes"},
        {"tcp": tcp(30, b"", 8 * 2**20 + 1), "why": "length over 8 MiB"},
        {"tcp": tcp(36, b"", 2**20 + 1), "why": "length over 1 MiB for a small frame"},
        {"tcp": tcp(47, b"", 16), "why": "unknown tag 47, known from 8 bytes"},
        {"tcp": tcp(46, struct.pack("<QII", 1, 1, 1)), "why": "reserved field not zero"},
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
        payload("Load", b"\xdd\xff\xff\xff\xff", "an array of four billion that is not there"),
        payload("Logprobs[]", b"\x91\x01", "no map and no nil"),
    ]
    return [{"name": _malformed_name(case), **case} for case in cases]


def _malformed_name(case: dict[str, Any]) -> str:
    where = "zmq" if "zmq" in case else "tcp" if "tcp" in case else case["payload"]
    return f"{where}: {case['why']}"


def prefixes() -> list[dict[str, Any]]:
    cases: list[tuple[str, list[int], int]] = [
        ("no tokens", [], 16),
        ("less than a block", [1, 2, 3], 4),
        ("one block", [1, 2, 3, 4], 4),
        ("two blocks and a rest", [1, 2, 3, 4, 5, 6, 7, 8, 9], 4),
        ("blocks of one token", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1),
        ("the largest id", [4294967295, 0], 2),
        ("blocks of 16 tokens", list(range(40)), 16),
    ]
    return [
        {
            "name": name,
            "token_ids": token_ids,
            "block_size": block_size,
            "hashes": [f"{one:016x}" for one in prefix_hashes(token_ids, block_size)],
        }
        for name, token_ids, block_size in cases
    ]


# Name, what config.json and tokenizer.json hold, and the bytes of each file of weights.
MODELS: Final[list[tuple[str, dict[str, str], dict[str, int]]]] = [
    (
        "one file of weights",
        {"config.json": '{"model_type": "llama"}\n', "tokenizer.json": "{}"},
        {"model.safetensors": 1000},
    ),
    (
        "two files of weights, no tokenizer",
        {"config.json": '{"model_type": "qwen3"}\n'},
        {"model-00002-of-00002.safetensors": 7, "model-00001-of-00002.safetensors": 5_000_000},
    ),
]


def fingerprints() -> list[dict[str, Any]]:
    """Of directories made for it: fingerprints go by the names and sizes of weights only."""
    found = []
    for name, files, weights in MODELS:
        with TemporaryDirectory() as directory:
            for file, content in files.items():
                (Path(directory) / file).write_text(content)
            for file, size in weights.items():
                with (Path(directory) / file).open("wb") as sparse:
                    sparse.truncate(size)
            digest = fingerprint(Path(directory))
        found.append({"name": name, "files": files, "weights": weights, "fingerprint": digest})
    return found


def layouts(payload: Callable[[str, bytes, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Layouts that are none."""
    full, state = msgspec.to_builtins(_FULL), msgspec.to_builtins(_STATE)
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
    twice = encode_map(_STATE)
    twice = bytes([twice[0] + 1]) + twice[1:] + b"\xaanum_layers\x02"
    return [
        *(payload("KVLayout", msgspec.msgpack.encode(content), why) for content, why in cases),
        payload("KVLayout", b"\x81\xa6groups\x91" + twice, "a key of a group twice"),
    ]


def kv_of(layout: KVLayout, rectangle: Rectangle) -> bytes:
    """KV that differs from place to place, in the order of the wire."""
    number, layers, heads, tokens = rectangle
    group = layout.groups[number]
    if isinstance(group, StateGroup):
        return bytes(
            (128 + 64 * layer + 8 * head + d) % 256
            for layer in layers
            for head in heads
            for d in range(group.head_bytes)
        )
    return bytes(
        (64 * layer + 32 * side + 16 * head + 4 * token + d + 7 * number) % 256
        for layer in layers
        for side, dim in enumerate((group.key_dim, group.value_dim))
        for head in heads
        for token in tokens
        for d in range(dim)
    )


def transfer(
    name: str,
    num_tokens: int,
    cached: int,
    segment_bytes: int,
    credit_bytes: int,
    spoil: int = 0,
    *,
    layout: KVLayout = LAYOUT,
    num_shards: int = 1,
    block_size: int = 0,
    unasked_bytes: int = 0,
    segment_port: int = 0,
    is_sealed: bool = False,
) -> dict[str, Any]:
    """Run one transfer and write down every message; segment `spoil`, if any, arrives broken.

    With a `block_size` the KV lies in memory, in blocks of so many tokens, the last one first.
    With `unasked_bytes` all is computed before it is offered, and goes with the offer if it fits.
    With a `segment_port` every segment goes there, and may be sealed.
    """
    token_ids = list(range(100, 100 + num_tokens))
    sender = KVSender(
        REQUEST,
        layout,
        token_ids,
        max_bytes=1 << 20,
        lease_s=30.0,
        segment_bytes=segment_bytes,
        num_shards=num_shards,
        memory=MEMORY if block_size else None,
        block_size=block_size or 1,
        key=KEY if is_sealed else None,
        token=TOKEN if segment_port else None,
        now=0.0,
    )
    memory = _memory_of(layout, num_tokens, block_size) if block_size else b""
    messages: list[dict[str, Any]] = []

    def note(who: str, header: Frame, *payload: Any) -> None:
        pieces = [bytes(part).hex() for part in parts.encode(header, *payload)]
        messages.append({"from": who, "zmq": pieces})

    if unasked_bytes:
        sender.advance(num_tokens, 0.0)
    cuts = [(it, kv_of(layout, it)) for it in sender.unasked(unasked_bytes)]
    header, payload = sender.offer_with([(*it, segment_digest(REQUEST, it[1])) for it in cuts])
    if cuts and spoil:
        payload[2 * spoil] = _spoilt(bytes(payload[2 * spoil]))
    note("prefill", header, *payload)
    receiver = KVReceiver(
        REQUEST,
        msgspec.msgpack.decode(payload[0], type=Offer),
        layout=layout,
        max_bytes=1 << 20,
        credit_bytes=credit_bytes,
        lease_s=30.0,
        now=0.0,
    )
    unasked = unasked_segments(header, payload, unasked_bytes)
    if unasked and not cached:
        answer = _store_all(receiver, receiver.accept_with(unasked, 0.0))
        note("decode", answer[0], *[it.pack() for it in answer[1:]])
        ack = None
    else:
        ack = receiver.accept(cached, 0.0, len(memory), segment_port)
    sender.advance(num_tokens, 0.0)
    while ack is not None:
        note("decode", ack[0], ack[1].pack())
        sender.on_ack(*ack, 0.0)
        rectangle = sender.next_segment()
        if rectangle is None:
            break
        places, kv = [], kv_of(layout, rectangle)
        if block_size and len(rectangle.tokens) == block_size:
            places = [len(memory) - len(kv) * rectangle.tokens.stop // block_size]
        if segment_port:
            header, descriptor, kv = _protected(sender, rectangle, kv)
        else:
            digest = segment_digest(REQUEST, kv)
            sent = sender.segment(rectangle, kv, 0.0, digest=digest, places=places)
            assert sent is not None
            header, descriptor, kv = sent[0], sent[1], bytes(sent[2])
        if spoil == header.segment:
            kv = _spoilt(kv)
        if segment_port:
            at_port = b"".join(stream.encode(header, descriptor, kv)).hex()
            messages.append({"from": "prefill", "segment_port": at_port})
        else:
            note("prefill", header, descriptor, kv)
        is_beside = bool(segment_port)
        segment = receiver.on_segment(header, (descriptor, kv), 0.0, is_beside=is_beside)
        assert segment is not None
        try:
            if is_sealed:
                receiver.opened(segment)
            else:
                kv = b"".join(segment.pieces(memory))
                receiver.verify(segment, segment_digest(REQUEST, kv))
        except TransferFailed as error:
            receiver.broken(segment, error)
            note("decode", Error(REQUEST, error.code))
            break
        ack = receiver.stored(segment, 0.0)
    return {
        "name": name,
        "layout": msgspec.to_builtins(layout),
        "request_id": REQUEST,
        "token_ids": token_ids,
        "cached_tokens": cached,
        "segment_bytes": segment_bytes,
        "num_shards": num_shards,
        "block_size": block_size,
        "unasked_bytes": unasked_bytes,
        "memory": memory.hex(),
        "segment_port": segment_port,
        "credit_bytes": credit_bytes,
        "messages": messages,
        "ends": receiver.state.value,
    }


def _protected(sender: KVSender, rectangle: Rectangle, kv: bytes) -> tuple[KvCache, bytes, bytes]:
    leaving = sender.leave(rectangle, 0.0)
    assert leaving is not None
    protected = sender.protect(*leaving, kv)
    assert protected is not None
    return leaving[0], protected[0].pack(), bytes(protected[1])


def _spoilt(kv: bytes) -> bytes:
    return bytes([kv[0] ^ 1]) + kv[1:]


def _store_all(receiver: KVReceiver, segments: list[Segment]) -> tuple[Any, ...]:
    """Store what came with an offer; return the answer."""
    ack = None
    for segment in segments:
        try:
            receiver.verify(segment)
        except TransferFailed as error:
            receiver.broken(segment, error)
            return (Error(REQUEST, error.code),)
        ack = receiver.stored(segment, 0.0)
    assert ack is not None
    return ack


def _memory_of(layout: KVLayout, num_tokens: int, block_size: int) -> bytes:
    """The whole blocks of a sequence, the last one first, all layers and heads of group 0."""
    group = layout.groups[0]
    first_tokens = range(0, num_tokens - block_size + 1, block_size)
    blocks = [range(first, first + block_size) for first in first_tokens]
    return b"".join(
        kv_of(layout, Rectangle(0, range(group.num_layers), range(group.num_heads), tokens))
        for tokens in reversed(blocks)
    )


def transfers() -> list[dict[str, Any]]:
    return [
        transfer("one segment", 3, 0, 1 << 20, 1 << 20),
        transfer("three segments, credit for one", 5, 0, 32, 32),
        transfer("a prefix is held already", 6, 4, 32, 1 << 20),
        transfer("everything is held already", 4, 4, 32, 1 << 20),
        transfer("a row is larger than a segment: layer by layer", 2, 0, 8, 1 << 20),
        transfer("the credit is smaller than a segment", 4, 0, 1 << 20, 20),
        transfer("the second segment arrives broken", 4, 0, 32, 1 << 20, spoil=2),
        transfer("layers with a window", 7, 0, 36, 1 << 20, layout=WINDOWS),
        transfer("a prefix into the window is held already", 7, 6, 36, 1 << 20, layout=WINDOWS),
        transfer("a prompt shorter than the window", 2, 0, 36, 1 << 20, layout=WINDOWS),
        transfer("a state", 5, 0, 36, 1 << 20, layout=STATES),
        transfer("a state, whatever is held", 5, 4, 12, 1 << 20, layout=STATES),
        transfer("a state is held already", 4, 4, 36, 1 << 20, layout=STATES),
        transfer("from two shards", 5, 0, 36, 36, layout=EVERY_KIND, num_shards=2),
        transfer("from more shards than heads", 3, 1, 36, 50, layout=EVERY_KIND, num_shards=3),
        transfer("in memory, but for what fills no block", 5, 0, 32, 1 << 20, block_size=2),
        transfer("a prefix into a block is held already", 6, 1, 32, 1 << 20, block_size=2),
        transfer("memory is not what was said", 6, 0, 32, 1 << 20, spoil=2, block_size=2),
        transfer("all with the offer", 3, 0, 1 << 20, 1 << 20, unasked_bytes=48),
        transfer(
            *("groups with the offer", 5, 0, 36, 1 << 20),
            layout=EVERY_KIND,
            num_shards=2,
            unasked_bytes=4096,
        ),
        transfer("with the offer, but a prefix is held", 6, 4, 32, 1 << 20, unasked_bytes=96),
        transfer("with the offer, but all is held", 4, 4, 32, 1 << 20, unasked_bytes=96),
        transfer("more than goes with an offer", 4, 0, 32, 1 << 20, unasked_bytes=63),
        transfer("with the offer, and broken", 4, 0, 32, 1 << 20, spoil=2, unasked_bytes=64),
        transfer("beside the KV socket", 5, 1, 32, 40, segment_port=SEGMENT_PORT),
        transfer("sealed", 5, 1, 32, 40, segment_port=SEGMENT_PORT, is_sealed=True),
        transfer(
            *("the second seal is broken", 4, 0, 32, 64, 2),
            segment_port=SEGMENT_PORT,
            is_sealed=True,
        ),
    ]


def sessions() -> list[dict[str, Any]]:
    ask, answer = Direction.REQUEST.value, Direction.RESPONSE.value
    prefill, done = [ask, "PREFILL_REQUEST"], [answer, "PREFILL_DONE"]
    decode, token = [ask, "DECODE_REQUEST"], [answer, "DECODE_TOKEN"]
    end, error, cancel = [answer, "DECODE_DONE"], [answer, "ERROR"], [ask, "CANCEL"]
    cases: list[tuple[str, list[list[str]], str]] = [
        ("one by one", [prefill, done, decode, token, token, end], "done"),
        ("pipelined", [prefill, decode, done, token, end], "done"),
        ("the first token is the last", [prefill, done, end], "done"),
        ("the first token is the last, pipelined", [prefill, decode, done, end], "done"),
        ("no token after the first", [prefill, done, decode, end], "done"),
        ("refused", [prefill, error], "failed"),
        ("refused, pipelined", [prefill, error, decode], "failed"),
        ("broken while decoding", [prefill, done, decode, token, error], "failed"),
        ("cancelled while prefilling", [prefill, cancel, done], "cancelled"),
        ("cancelled, tokens cross", [prefill, decode, done, cancel, token, end], "cancelled"),
        ("a cancel crosses the end", [prefill, done, decode, end, cancel], "done"),
        ("still going", [prefill, decode, done, token], "decoding"),
        ("nothing was asked", [token], "error"),
        ("tokens before the prompt is read", [prefill, decode, token], "error"),
        ("decode asked twice", [prefill, decode, decode], "error"),
        ("prompt sent twice", [prefill, prefill], "error"),
        ("a token after the end", [prefill, done, decode, end, token], "error"),
        ("two ends", [prefill, done, decode, end, end], "error"),
        ("an error after the end", [prefill, done, decode, end, error], "error"),
        ("a token after an error", [prefill, decode, done, error, token], "error"),
    ]
    return [{"name": name, "events": events, "ends": ends} for name, events, ends in cases]


def vectors() -> dict[str, Any]:
    return {
        "version": VERSION,
        "frames": data_plane() + control_plane(),
        "malformed": malformed(),
        "prefix": prefixes(),
        "fingerprint": fingerprints(),
        "transfer": transfers(),
        "sessions": sessions(),
    }


def render() -> str:
    """The file's text: one vector a line, so that a difference shows which one changed."""
    sections = []
    for name, content in vectors().items():
        if isinstance(content, list):
            lines = ",\n".join("    " + json.dumps(one) for one in content)
            sections.append(f'  "{name}": [\n{lines}\n  ]')
        else:
            sections.append(f'  "{name}": {json.dumps(content)}')
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        if PATH.read_text() == render():
            return 0
        print("wire/vectors.json is not what the code gives; run scripts/vectors.py and look")
        return 1
    PATH.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
