"""Whole transfers of KV, every message of both sides."""

from __future__ import annotations

from typing import Any

import msgspec

from scripts.vector_cases.given import (
    EVERY_KIND,
    KEY,
    LAYOUT,
    MEMORY,
    REQUEST,
    SEGMENT_PORT,
    STATES,
    TOKEN,
    WINDOWS,
    kv_of,
)
from wire import parts, stream
from wire.errors import TransferFailed
from wire.frames import Error, Frame, KvCache
from wire.layout import KVLayout
from wire.payloads import Offer
from wire.transfer import KVReceiver, KVSender, Rectangle, Segment, segment_digest, unasked_segments


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
