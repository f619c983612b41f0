"""Vectors of the frames by which peers join, are watched and leave."""

from __future__ import annotations

from typing import Any

import msgspec

from scripts.vector_cases.envelopes import frame, mapped
from scripts.vector_cases.given import EPOCH, EVERY_KIND, LAYOUT, REQUEST
from wire.errors import ErrorCode
from wire.frames import Cancel, Drain, Error, Heartbeat, Hello, Peers, Role, Welcome
from wire.payloads import ErrorDetail, HelloDetail, Load, PeerDetail, WelcomeDetail
from wire.prefix import prefix_hashes


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
