"""The prefill worker's end of a transfer, step by step."""

from __future__ import annotations

import pytest

from tests.kv import part, whole
from wire.errors import LocalProtocolError, RemoteProtocolError, TransferTooLarge
from wire.frames import KvCache, KvCacheAck
from wire.layout import KVLayout, StateGroup
from wire.payloads import Credit
from wire.transfer.segment import (
    MAX_SEGMENT_BYTES,
    MAX_UNASKED_SEGMENTS,
    Rectangle,
    SegmentDescriptor,
)
from wire.transfer.sender import HANDOVER_LEASES, KVSender

LAYOUT = KVLayout.uniform(
    num_layers=2, num_kv_heads=2, head_dim=2, dtype="uint8"
)  # 16 bytes a token
ID = 5 << 32 | 9
LEASE_S = 9.0


def sender(num_tokens: int = 6, *, segment_bytes: int = 32, max_bytes: int = 1024) -> KVSender:
    return KVSender(
        ID,
        LAYOUT,
        range(num_tokens),
        max_bytes=max_bytes,
        lease_s=LEASE_S,
        segment_bytes=segment_bytes,
        now=0.0,
    )


def state_of(one: KVSender) -> str:
    return one.state.value


def ack(one: KVSender, kv_bytes: int, credit: int, cached: int = 0, ready: int = 0) -> None:
    one.on_ack(KvCacheAck(ID, kv_bytes), Credit(credit, cached, ready), 1.0)


def send(
    one: KVSender, rectangle: Rectangle, now: float = 2.0
) -> tuple[KvCache, SegmentDescriptor]:
    sent = one.segment(rectangle, bytes(rectangle.num_bytes(LAYOUT)), now)
    assert sent is not None
    return sent[0], SegmentDescriptor.unpack(sent[1])


def test_no_byte_is_offered_past_max_transfer() -> None:
    assert sender(4, max_bytes=64).offer()
    one = sender(5, max_bytes=64)
    with pytest.raises(TransferTooLarge) as caught:
        one.offer()
    assert (caught.value.size, caught.value.limit) == (80, 64)
    assert state_of(one) == "failed" and one.error is caught.value


def test_a_segment_needs_a_credit_and_computed_tokens() -> None:
    one = sender()
    one.advance(6, 0.5)
    assert one.next_segment() is None, "no ACK yet"
    ack(one, 0, 40)
    assert state_of(one) == "sending" and one.accepted_at == 1.0
    assert one.next_segment() == whole(LAYOUT, 0, 2)
    assert one.next_segment() is None, "32 of 40 bytes are claimed"
    ack(one, 0, 63)
    assert one.next_segment() is None, "it would be 64"
    ack(one, 0, 64)
    ack(one, 0, 40)  # late
    assert one.next_segment() == whole(LAYOUT, 2, 2)

    late = sender()
    ack(late, 0, 1024)
    assert late.next_segment() is None
    late.advance(3, 2.0)
    assert late.next_segment() == whole(LAYOUT, 0, 2)
    assert late.next_segment() is None, "the fourth token is not there"
    late.advance(2, 3.0)  # stale, harmless
    late.advance(4, 3.0)
    assert late.next_segment() == whole(LAYOUT, 2, 2)


def test_segments_claimed_ahead_of_the_credit_wait_for_it() -> None:
    one = sender()
    one.advance(6, 0.5)
    ack(one, 0, 32)
    first, second = one.next_segment(32), one.next_segment(32)
    assert first is not None and second is not None
    assert one.next_segment(32) is None, "64 bytes are claimed"
    assert one.has_credit(first)
    send(one, first)
    assert not one.has_credit(second)
    with pytest.raises(LocalProtocolError, match="beyond the credit"):
        send(one, second)
    ack(one, 32, 64)
    assert one.has_credit(second)
    send(one, second)
    assert one.kv_bytes == 64


def test_acks_alone_do_not_keep_the_senders_blocks() -> None:
    one = sender()
    ack(one, 0, 0)
    one.advance(4, 0.0)
    now, step = 0.0, 1.0
    assert not one.expired(now)
    while not one.expired(now) and now < 1e4:  # it says again and again that the offer waits
        if now == 100.0:
            one.advance(6, now)
        one.on_ack(KvCacheAck(ID, 0), Credit(0, 0, 0), now)
        now += step
    assert now == 100.0 + HANDOVER_LEASES * LEASE_S


def test_idle_time_is_waiting_for_the_prompt_and_nothing_else() -> None:
    one = sender(6)
    ack(one, 0, 64)  # at 1.0
    one.advance(4, 1.5)
    first = one.next_segment()
    assert first is not None
    _, descriptor = send(one, first, now=1.75)
    assert descriptor.idle_us == 500_000, "from the ACK to the tokens"
    second = one.next_segment()
    assert second is not None
    _, descriptor = send(one, second, now=2.0)
    assert descriptor.idle_us == 0, "it was there when the first left"
    one.advance(6, 3.0)
    assert one.next_segment() is None, "no credit: the receiver is slow, not we"
    one.on_ack(KvCacheAck(ID, 64), Credit(96, 0, 0), 5.0)
    third = one.next_segment()
    assert third is not None
    _, descriptor = send(one, third, now=5.0)
    assert descriptor.idle_us == 1_000_000


def test_a_state_that_is_larger_than_segments_goes_whole() -> None:
    state = StateGroup(num_layers=2, num_heads=1, head_bytes=100)
    layout = KVLayout(groups=(LAYOUT.groups[0], state))
    one = KVSender(ID, layout, range(2), max_bytes=999, lease_s=9.0, segment_bytes=32, now=0.0)
    ack(one, 0, 999)
    one.advance(2, 1.0)
    sizes = []
    while (rectangle := one.next_segment()) is not None:
        sizes.append(rectangle.num_bytes(layout))
    assert sizes == [32, 100, 100]


@pytest.mark.parametrize(
    ("acks", "reason"),
    [
        ([(1, 64, 0, 0)], "1 bytes, but 0 were sent"),
        ([(0, 64, 7, 0)], "cached_tokens is 7 of 6"),
        ([(0, 64, 2, 0), (0, 64, 3, 0)], "cached_tokens changed"),
        ([(0, 64, 0, 1)], "ready is 1 at 0 of 96"),
        ([(0, 64, 6, 0)], "ready is 0 at 0 of 0"),
        ([(0, 7, 0, 0)], "credit 7 is too small.* one layer of one token"),
    ],
)
def test_an_invalid_ack_ends_the_transfer(
    acks: list[tuple[int, int, int, int]], reason: str
) -> None:
    one = sender()
    with pytest.raises(RemoteProtocolError, match=reason) as caught:
        for fields in acks:
            ack(one, *fields)
    assert state_of(one) == "failed" and one.error is caught.value


def test_an_offer_that_waits_stays_offered_and_keeps_the_lease() -> None:
    one = sender()
    one.on_ack(KvCacheAck(ID, 0), Credit(0, 0, 0), 8.0)
    assert state_of(one) == "offered" and one.accepted_at is None
    assert not one.expired(16.9) and one.expired(17.0)
    ack(one, 0, 96)
    one.on_ack(KvCacheAck(ID, 0), Credit(0, 0, 0), 8.0)  # late: from before the reservation
    assert state_of(one) == "sending" and one.skipped_tokens == 0


def test_bytes_cannot_be_acknowledged_of_an_offer_that_waits() -> None:
    one = sender(1)
    one.advance(1, 0.0)
    ack(one, 0, 16)
    rectangle = one.next_segment()
    assert rectangle is not None
    send(one, rectangle)
    with pytest.raises(RemoteProtocolError, match="still waits"):
        ack(one, 16, 0)


def test_keepalives_are_due_after_a_third_of_a_lease_without_an_ack() -> None:
    one = sender(1)
    assert one.keepalive(2.9) is None
    assert one.keepalive(3.0) == KvCache(ID, 0, 0)
    assert one.keepalive(5.9) is None
    one.on_ack(KvCacheAck(ID, 0), Credit(16, 0, 0), 5.5)
    one.advance(1, 6.0)
    rectangle = one.next_segment()
    assert rectangle is not None
    send(one, rectangle, now=8.4)  # whose ACK may be held back
    assert one.keepalive(8.4) is None and one.keepalive(8.5) == KvCache(ID, 0, 0)
    one.cancel()
    assert one.keepalive(99.0) is None


def test_our_own_mistakes() -> None:
    for segment_bytes in (0, MAX_SEGMENT_BYTES + 1):
        with pytest.raises(LocalProtocolError, match="segment_bytes"):
            sender(segment_bytes=segment_bytes)
    one = sender(2)
    with pytest.raises(LocalProtocolError, match="3 tokens computed of 2"):
        one.advance(3, 0.0)
    ack(one, 0, 64)
    one.advance(2, 0.0)
    rectangle = one.next_segment()
    assert rectangle is not None
    with pytest.raises(LocalProtocolError, match="bytes for"):
        one.segment(rectangle, bytes(3), 0.0)
    with pytest.raises(LocalProtocolError, match="where it lies"):
        one.segment(rectangle, b"", 0.0, digest=9, places=(0,))
    with pytest.raises(LocalProtocolError, match="is not claimed"):
        one.segment(part(LAYOUT, 0, 1, 0, 1), bytes(8), 0.0)
    with pytest.raises(LocalProtocolError, match="given to transfer"):
        one.on_ack(KvCacheAck(ID + 1, 0), Credit(64, 0, 0), 0.0)


MEMORY = "baton-1"


def with_memory(num_tokens: int = 7) -> KVSender:
    """A sender of 2 tokens a block, 64 bytes a segment."""
    return KVSender(
        ID,
        LAYOUT,
        range(num_tokens),
        max_bytes=1024,
        lease_s=LEASE_S,
        segment_bytes=64,
        block_size=2,
        memory=MEMORY,
        now=0.0,
    )


@pytest.mark.parametrize(
    ("credit", "largest"), [(512, 160), (256, 128), (96, 64), (48, 32), (32, 32)]
)
def test_half_of_the_credit_is_read_at_a_time_within_a_limit(
    monkeypatch: pytest.MonkeyPatch, credit: int, largest: int
) -> None:
    monkeypatch.setattr("wire.transfer.sender.MAX_READ_BYTES", 160)
    one = with_memory(16)  # 64 bytes a segment where KV is sent, 32 a block
    one.on_ack(KvCacheAck(ID, 0), Credit(credit, 0, 0, 1), 1.0)
    assert max(rectangle.num_bytes(LAYOUT) for rectangle in one.plan) == largest


def computed(num_tokens: int = 4, segment_bytes: int = 32) -> KVSender:
    one = sender(num_tokens, segment_bytes=segment_bytes)
    one.advance(num_tokens, 0.0)
    return one


def with_offer(one: KVSender, most_bytes: int = 1024) -> tuple[KvCache, list[bytes]]:
    cuts = one.unasked(most_bytes)
    kv = [(it, bytes(it.num_bytes(LAYOUT)), 7 + index) for index, it in enumerate(cuts)]
    frame, payload = one.offer_with(kv)
    return frame, [bytes(part) for part in payload]


@pytest.mark.parametrize(
    ("kv_bytes", "credit", "ready"),
    [(32, 64, 0), (64, 64, 0), (32, 64, 1), (80, 80, 1)],
)
def test_kv_with_an_offer_is_acknowledged_whole_or_not_at_all(
    kv_bytes: int, credit: int, ready: int
) -> None:
    one = computed()
    with_offer(one)
    with pytest.raises(RemoteProtocolError):
        ack(one, kv_bytes, credit, ready=ready)
    assert state_of(one) == "failed"


def test_only_small_and_computed_kv_goes_with_the_offer() -> None:
    assert computed().unasked(63) == []
    assert computed().unasked(0) == []
    assert sender(4).unasked(64) == []
    half = sender(4)
    half.advance(2, 0.0)
    assert half.unasked(64) == []
    assert len(computed(16, segment_bytes=16).unasked(1024)) == MAX_UNASKED_SEGMENTS
    assert computed(17, segment_bytes=16).unasked(1024) == []
    assert with_offer(sender(4))[0] == KvCache(ID, 0, 0)


# Segments beside the KV socket.

KEY, TOKEN, PORT = bytes(range(32)), bytes(range(32, 64)), 5601


def beside(key: bytes | None) -> KVSender:
    return KVSender(
        *(ID, LAYOUT, range(4)),
        max_bytes=1024,
        lease_s=LEASE_S,
        segment_bytes=32,
        now=0.0,
        key=key,
        token=TOKEN,
    )


def leaving(one: KVSender) -> tuple[KvCache, SegmentDescriptor]:
    rectangle = one.next_segment()
    assert rectangle is not None
    leaves = one.leave(rectangle, 2.0)
    assert leaves is not None
    return leaves


def test_nothing_leaves_after_the_end_and_above_all_not_unsealed() -> None:
    one = beside(KEY)
    one.advance(4, 0.5)
    one.on_ack(KvCacheAck(ID, 0), Credit(64, 0, 0, 0, PORT), 1.0)
    left, rectangle = leaving(one), one.next_segment()
    assert rectangle is not None
    one.cancel()
    assert one.protect(*left, bytes(32)) is None
    assert one.leave(rectangle, 2.0) is None


@pytest.mark.parametrize(
    ("one", "credits", "reason"),
    [
        (sender(), [Credit(64, 0, 0, 1)], "in_memory is 1, but no memory was offered"),
        (with_memory(), [Credit(64, 0, 0, 1), Credit(64, 0, 0)], "in_memory changed"),
        (with_memory(), [Credit(64, 0, 0), Credit(64, 0, 0, 1)], "in_memory changed"),
        (sender(), [Credit(64, 0, 0, 0, PORT)], "segment_port, but no token was offered"),
        (beside(KEY), [Credit(64, 0, 0, 0, PORT), Credit(64, 0, 0)], "segment_port changed"),
        (beside(KEY), [Credit(64, 0, 0), Credit(64, 0, 0, 0, PORT)], "segment_port changed"),
    ],
)
def test_the_first_credit_settles_where_segments_go(
    one: KVSender, credits: list[Credit], reason: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        for credit in credits:
            one.on_ack(KvCacheAck(ID, 0), credit, 1.0)
    assert state_of(one) == "failed"
