"""Runs complete KV transfers for wire/vectors.json, and records every message of both sides."""

from __future__ import annotations

from typing import Any

import msgspec

from wire import parts, stream
from wire.errors import TransferFailed
from wire.frames import Error, Frame, KvCache
from wire.layout import KVGroup, KVLayout, StateGroup
from wire.payloads import Offer
from wire.transfer import KVReceiver, KVSender, Rectangle, Segment, segment_digest, unasked_segments

# A request id: the router's epoch 1 in the high half, the first attempt in the low half.
REQUEST = 1 << 32 | 1
MEMORY = "baton-8d0c5f2e"
# This key is public, so it is for the vectors only.
KEY, TOKEN, SEGMENT_PORT = bytes(range(32)), bytes(range(32, 64)), 5601
LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="uint8")
FULL = KVGroup(num_layers=1, num_kv_heads=2, key_dim=4, value_dim=2, dtype="uint8")
WINDOWED = msgspec.structs.replace(FULL, num_layers=2, window=3)
STATE = StateGroup(num_layers=2, num_heads=4, head_bytes=3)
WINDOWS = KVLayout(groups=(FULL, WINDOWED))
STATES = KVLayout(groups=(STATE, FULL))
EVERY_KIND = KVLayout(groups=(FULL, WINDOWED, STATE))


def kv_of(layout: KVLayout, rectangle: Rectangle) -> bytes:
    """Return KV in wire order, whose values depend on layer, head, token and dimension."""
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
    """Run one transfer and return it with every message.

    Args:
        cached: The number of prompt tokens that the receiver has already.
        spoil: The number of the segment to corrupt; 0 for none.
        block_size: If not 0, KV is read from shared memory, in blocks of this many tokens, of
            which the last one is at the lowest address.
        unasked_bytes: If not 0, KV is computed before the offer, and sent with it if it fits.
        segment_port: If not 0, segments are sent to this port, encrypted if `is_sealed`.
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

    def record(sender_role: str, header: Frame, *payload: Any) -> None:
        message = [bytes(part).hex() for part in parts.encode(header, *payload)]
        messages.append({"from": sender_role, "zmq": message})

    if unasked_bytes:
        sender.advance(num_tokens, 0.0)
    cuts = [(it, kv_of(layout, it)) for it in sender.unasked(unasked_bytes)]
    header, payload = sender.offer_with([(*it, segment_digest(REQUEST, it[1])) for it in cuts])
    if cuts and spoil:
        payload[2 * spoil] = _spoilt(bytes(payload[2 * spoil]))
    record("prefill", header, *payload)
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
        record("decode", answer[0], *[it.pack() for it in answer[1:]])
        ack = None
    else:
        ack = receiver.accept(cached, 0.0, len(memory), segment_port)
    sender.advance(num_tokens, 0.0)
    while ack is not None:
        record("decode", ack[0], ack[1].pack())
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
            record("prefill", header, descriptor, kv)
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
            record("decode", Error(REQUEST, error.code))
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
    """Store the segments that were sent with an offer; return the reply."""
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
    """Return the complete blocks of a sequence, last one first, for all of group 0."""
    group = layout.groups[0]
    first_tokens = range(0, num_tokens - block_size + 1, block_size)
    blocks = [range(first, first + block_size) for first in first_tokens]
    return b"".join(
        kv_of(layout, Rectangle(0, range(group.num_layers), range(group.num_heads), tokens))
        for tokens in reversed(blocks)
    )


def transfers() -> list[dict[str, Any]]:
    most, port = 1 << 20, {"segment_port": SEGMENT_PORT}
    # Each case: name; num_tokens, cached, segment_bytes, credit_bytes; other arguments.
    cases: list[tuple[str, tuple[int, int, int, int], dict[str, Any]]] = [
        ("one segment", (3, 0, most, most), {}),
        ("three segments, credit for one", (5, 0, 32, 32), {}),
        ("a prefix is held already", (6, 4, 32, most), {}),
        ("everything is held already", (4, 4, 32, most), {}),
        ("a row is larger than a segment: layer by layer", (2, 0, 8, most), {}),
        ("the credit is smaller than a segment", (4, 0, most, 20), {}),
        ("the second segment arrives broken", (4, 0, 32, most), {"spoil": 2}),
        ("layers with a window", (7, 0, 36, most), {"layout": WINDOWS}),
        ("a prefix into the window is held already", (7, 6, 36, most), {"layout": WINDOWS}),
        ("a prompt shorter than the window", (2, 0, 36, most), {"layout": WINDOWS}),
        ("a state", (5, 0, 36, most), {"layout": STATES}),
        ("a state, whatever is held", (5, 4, 12, most), {"layout": STATES}),
        ("a state is held already", (4, 4, 36, most), {"layout": STATES}),
        ("from two shards", (5, 0, 36, 36), {"layout": EVERY_KIND, "num_shards": 2}),
        ("from more shards than heads", (3, 1, 36, 50), {"layout": EVERY_KIND, "num_shards": 3}),
        ("in memory, but for what fills no block", (5, 0, 32, most), {"block_size": 2}),
        ("a prefix into a block is held already", (6, 1, 32, most), {"block_size": 2}),
        ("memory is not what was said", (6, 0, 32, most), {"spoil": 2, "block_size": 2}),
        ("all with the offer", (3, 0, most, most), {"unasked_bytes": 48}),
        (
            *("groups with the offer", (5, 0, 36, most)),
            {"layout": EVERY_KIND, "num_shards": 2, "unasked_bytes": 4096},
        ),
        ("with the offer, but a prefix is held", (6, 4, 32, most), {"unasked_bytes": 96}),
        ("with the offer, but all is held", (4, 4, 32, most), {"unasked_bytes": 96}),
        ("more than goes with an offer", (4, 0, 32, most), {"unasked_bytes": 63}),
        ("with the offer, and broken", (4, 0, 32, most), {"spoil": 2, "unasked_bytes": 64}),
        ("beside the KV socket", (5, 1, 32, 40), port),
        ("sealed", (5, 1, 32, 40), port | {"is_sealed": True}),
        ("the second seal is broken", (4, 0, 32, 64), port | {"spoil": 2, "is_sealed": True}),
    ]
    return [transfer(name, *sizes, **rest) for name, sizes, rest in cases]
