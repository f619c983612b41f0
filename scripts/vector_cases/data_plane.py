"""Vectors of the frames of requests, tokens and KV."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from scripts.vector_cases.envelopes import frame, mapped
from scripts.vector_cases.given import KEY, LAYOUT, MEMORY, REQUEST, SEGMENT_PORT, TOKEN
from wire.frames import (
    ANY_RANK,
    AS_MANY_AS_FIT,
    NO_RANK,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    KvCache,
    KvCacheAck,
    PrefillDone,
    PrefillRequest,
)
from wire.logprobs import join_prompt_logprobs, pack_logprobs, unpack_prompt_logprobs
from wire.options import Options, Structure
from wire.payloads import (
    Credit,
    Logprobs,
    Offer,
    PrefillResult,
    Usage,
    encode_continuation,
    encode_map,
    encode_prefill_result,
    encode_prompt,
)
from wire.transfer import Rectangle, Sealing, SegmentDescriptor, pack_places, segment_digest


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
        content=result_content(result),
    )


def result_content(result: PrefillResult) -> dict[str, Any]:
    """A prefill result as JSON, with the prompt's logprobs as maps."""
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
    offered = {
        "layout": msgspec.to_builtins(LAYOUT),
        "num_tokens": 3,
        "total_bytes": offer.total_bytes,
        "token_ids": [11, 12, 13],
    }
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
            content=offered,
        ),
        frame(
            "kv_cache_offer_memory",
            KvCache(REQUEST, 0, 0),
            [encode_map(msgspec.structs.replace(offer, memory=MEMORY))],
            kind="Offer",
            content={**offered, "memory": MEMORY},
        ),
        frame(
            "kv_cache_offer_sealing",
            KvCache(REQUEST, 0, 0),
            [encode_map(msgspec.structs.replace(offer, key=KEY, token=TOKEN))],
            kind="Offer",
            content={**offered, "key": KEY.hex(), "token": TOKEN.hex()},
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
