"""The decode worker's end of a transfer, step by step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv import part, whole
from wire.errors import (
    ErrorCode,
    LocalProtocolError,
    RemoteProtocolError,
    TransferFailed,
    TransferTooLarge,
)
from wire.frames import KvCache, KvCacheAck
from wire.layout import KVGroup, KVLayout, StateGroup
from wire.parts import Buffer
from wire.payloads import Credit, Offer
from wire.transfer import TransferState
from wire.transfer.receiver import KVReceiver, Segment
from wire.transfer.sealing import Sealing
from wire.transfer.segment import (
    MAX_READ_BYTES,
    MAX_SEGMENT_BYTES,
    MAX_SEGMENTS,
    SegmentDescriptor,
    pack_places,
    segment_digest,
)

LAYOUT = KVLayout.uniform(
    num_layers=2, num_kv_heads=1, head_dim=4, dtype="uint8"
)  # 16 bytes a token
ID = 5 << 32 | 9


def offer(num_tokens: int = 4, **changed: Any) -> Offer:
    fields = {
        "layout": LAYOUT,
        "num_tokens": num_tokens,
        "total_bytes": 16 * num_tokens,
        "token_ids": bytes(4 * num_tokens),
        **changed,
    }
    return Offer(**fields)


def receiver(
    one: Offer | None = None,
    *,
    layout: KVLayout = LAYOUT,
    credit_bytes: int = 1024,
    max_bytes: int = 1024,
) -> KVReceiver:
    return KVReceiver(
        ID,
        one or offer(),
        layout=layout,
        max_bytes=max_bytes,
        credit_bytes=credit_bytes,
        lease_s=9.0,
        now=0.0,
    )


def accepted(num_tokens: int = 4, cached: int = 0, credit_bytes: int = 1024) -> KVReceiver:
    one = receiver(offer(num_tokens), credit_bytes=credit_bytes)
    assert one.accept(cached, 1.0) is not None
    return one


def payload(
    layer: int, layers: int, token: int, tokens: int, idle_us: int = 0, **changed: int
) -> tuple[bytes, bytes]:
    kv = bytes([token + 1]) * (8 * layers * tokens)
    fields = {"num_bytes": len(kv), "digest": segment_digest(ID, kv), **changed}
    rectangle = part(LAYOUT, layer, layers, token, tokens)
    return SegmentDescriptor.of(rectangle, idle_us=idle_us, **fields).pack(), kv


def take(one: KVReceiver, number: int, of: int, *parts: Buffer, now: float = 2.0) -> Segment:
    segment = one.on_segment(KvCache(ID, number, of), parts, now)
    assert segment is not None
    one.verify(segment)
    return segment


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"total_bytes": 63}, ErrorCode.PROTOCOL),
        ({"token_ids": bytes(15)}, ErrorCode.PROTOCOL),
        (
            {"layout": KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float16")},
            ErrorCode.MISMATCH,
        ),
    ],
)
def test_an_offer_that_contradicts_itself_or_us_is_refused(
    changed: dict[str, Any], code: ErrorCode
) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        receiver(offer(**changed))
    assert caught.value.code is code


def test_the_same_groups_in_another_order_are_another_layout() -> None:
    groups = (LAYOUT.groups[0], StateGroup(num_layers=1, num_heads=1, head_bytes=8))
    ours, theirs = KVLayout(groups=groups), KVLayout(groups=groups[::-1])
    one = offer(layout=theirs, total_bytes=theirs.transfer_bytes(4))
    with pytest.raises(RemoteProtocolError) as caught:
        KVReceiver(ID, one, layout=ours, max_bytes=99, credit_bytes=99, lease_s=9.0, now=0.0)
    assert caught.value.code is ErrorCode.MISMATCH


def test_no_segment_is_larger_than_any_may_be() -> None:
    num_tokens = MAX_SEGMENT_BYTES // 16 + 1
    one = receiver(offer(num_tokens), credit_bytes=1 << 30, max_bytes=1 << 30)
    one.accept(0, 1.0)
    with pytest.raises(RemoteProtocolError, match="4194320 bytes for"):
        one.on_segment(KvCache(ID, 1, 1), payload(0, 2, 0, num_tokens), 2.0)


def test_no_block_is_reserved_past_max_transfer() -> None:
    assert receiver(max_bytes=64)
    with pytest.raises(TransferTooLarge) as caught:
        receiver(max_bytes=63)
    assert (caught.value.size, caught.value.limit) == (64, 63)


def test_a_vast_offer_is_refused_before_its_tokens_are_read() -> None:
    with pytest.raises(RemoteProtocolError, match="token_ids are not"):
        receiver(offer(2**31 - 1, token_ids=b""), max_bytes=1 << 60)


def test_the_first_credit_follows_the_reservation() -> None:
    one = receiver(credit_bytes=40)
    assert one.token_ids == (0, 0, 0, 0)
    assert one.on_keepalive(0.5) == (KvCacheAck(ID, 0), Credit(0, 0, 0)), "still waiting"
    assert one.inflight_bytes == 0
    assert one.accept(1, 1.0) == (KvCacheAck(ID, 0), Credit(40, 1, 0))
    assert one.state is TransferState.RECEIVING and one.inflight_bytes == 40
    assert one.on_keepalive(2.0) == (KvCacheAck(ID, 0), Credit(40, 1, 0))


def test_credit_is_a_window_that_ends_with_the_transfer() -> None:
    one = accepted(credit_bytes=32)
    first = take(one, 1, 3, *payload(0, 2, 0, 1))
    assert one.stored(first, 3.0) == (KvCacheAck(ID, 16), Credit(48, 0, 0))
    second = take(one, 2, 3, *payload(0, 2, 1, 2))
    assert one.stored(second, 3.0) == (KvCacheAck(ID, 48), Credit(64, 0, 0))
    third = take(one, 3, 3, *payload(0, 2, 3, 1))
    assert not one.is_complete
    assert one.stored(third, 4.0) == (KvCacheAck(ID, 64), Credit(64, 0, 1))
    assert one.is_complete and one.inflight_bytes == 0


def test_all_cached_is_complete_at_once() -> None:
    one = receiver()
    assert one.accept(4, 1.0) == (KvCacheAck(ID, 0), Credit(0, 4, 1))
    assert one.is_complete and one.kv_seconds == one.transfer_s == 0.0


def test_segments_may_come_in_any_order_and_twice() -> None:
    one = accepted()
    late = payload(0, 2, 2, 2)
    second = take(one, 2, 2, *late)
    assert one.on_segment(KvCache(ID, 2, 2), late, 2.0) is None, "not stored yet, still known"
    assert one.stored(second, 3.0) == (KvCacheAck(ID, 32), Credit(64, 0, 0))
    first = take(one, 1, 2, b"".join(payload(0, 2, 0, 2)))  # one part, as on raw TCP
    assert bytes(first.kv) == bytes([1]) * 32
    one.stored(first, 3.0)
    assert one.is_complete
    assert one.on_segment(KvCache(ID, 2, 2), late, 4.0) is None
    assert one.kv_bytes == 64


def test_layer_groups_may_be_sent() -> None:
    one = accepted(2)
    for number, layer in enumerate((1, 0), start=1):
        one.stored(take(one, number, 2, *payload(layer, 1, 0, 2)), 3.0)
    assert one.is_complete


GOOD = payload(0, 2, 0, 2)


@pytest.mark.parametrize(
    ("number", "of", "parts", "reason"),
    [
        (0, 2, GOOD, "segment 0 of 2"),
        (3, 2, GOOD, "segment 3 of 2"),
        (1, MAX_SEGMENTS + 1, GOOD, "segment 1 of 65537"),
        (2, 3, GOOD, "num_segments changed"),
        (2, 2, (), "0 payload parts"),
        (2, 2, (*GOOD, b""), "3 payload parts"),
        (2, 2, (b"", b""), "descriptor has 0 bytes"),
        (2, 2, (GOOD[0][:47],), "descriptor has 47 bytes"),
        (2, 2, payload(0, 2, 0, 2), "overlaps"),
        (2, 2, payload(0, 2, 3, 2), "leaves"),
        (2, 2, payload(1, 1, 2, 2), "cuts the layers"),
        (2, 2, payload(0, 2, 2, 0), "empty"),
        (2, 2, payload(0, 2, 2, 2, num_bytes=31), "32 bytes for"),
        (2, 2, (payload(0, 2, 2, 2)[0], bytes(31)), "31 bytes for"),
        (1, 2, payload(0, 2, 2, 2), "came twice and differs"),
        (2, 2, payload(0, 2, 2, 1), "2 of 2 segments came, but 48 of 64 bytes"),
    ],
)
def test_a_wrong_segment_ends_the_transfer(
    number: int, of: int, parts: tuple[bytes, ...], reason: str
) -> None:
    one = accepted()
    take(one, 1, 2, *GOOD)
    with pytest.raises(RemoteProtocolError, match=reason) as caught:
        one.on_segment(KvCache(ID, number, of), parts, 2.0)
    assert one.state is TransferState.FAILED and one.error is caught.value
    assert one.num_unpacking == 1, "the first only: nobody brings the wrong one back"


@given(st.data())
def test_after_any_violation_nothing_is_waited_for_but_what_was_handed_out(
    data: st.DataObject,
) -> None:
    """Blocks are given back when `num_unpacking` is 0: a segment that nobody has would keep them.

    A transfer of 8 tokens in 1 to 4 segments, of which one is wrong somehow.
    """
    one, of = accepted(8, data.draw(st.sampled_from((0, 4)))), data.draw(st.integers(1, 4))
    handed_out: list[Segment] = []
    for number in range(1, of + 1):
        start, tokens = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
        parts = payload(*data.draw(st.sampled_from(((0, 2), (0, 1), (1, 1)))), start, tokens)
        try:
            segment = one.on_segment(KvCache(ID, number, of), parts, 2.0)
        except RemoteProtocolError:
            break
        if segment is not None:
            handed_out.append(segment)
    assert one.num_unpacking == len(handed_out)
    for segment in handed_out:
        one.stored(segment, 3.0)
    assert one.num_unpacking == 0


def test_a_transfer_that_is_whole_too_early_is_wrong() -> None:
    one = accepted()
    with pytest.raises(RemoteProtocolError, match="1 of 2 segments came, but 64 of 64 bytes"):
        one.on_segment(KvCache(ID, 1, 2), payload(0, 2, 0, 4), 2.0)


def test_no_byte_is_let_in_past_the_credit() -> None:
    one = accepted(credit_bytes=32)
    first = take(one, 1, 4, *payload(0, 2, 0, 1))
    take(one, 2, 4, *payload(0, 2, 1, 1))
    one.stored(first, 2.0)
    take(one, 3, 4, *payload(0, 2, 2, 1))
    with pytest.raises(RemoteProtocolError, match="segment 4 is over the credit"):
        one.on_segment(KvCache(ID, 4, 4), payload(0, 2, 3, 1), 2.0)


def test_cached_tokens_are_not_written() -> None:
    one = accepted(cached=2)
    with pytest.raises(RemoteProtocolError, match=r"range\(2, 4\)"):
        one.on_segment(KvCache(ID, 1, 2), payload(0, 2, 1, 1), 2.0)


def test_no_segment_before_the_reservation() -> None:
    one = receiver()
    with pytest.raises(RemoteProtocolError, match="before the first credit"):
        one.on_segment(KvCache(ID, 1, 1), payload(0, 2, 0, 4), 2.0)


def test_a_wrong_digest_fails_closed() -> None:
    one = accepted()
    descriptor, kv = payload(0, 2, 0, 2)
    segment = one.on_segment(KvCache(ID, 1, 2), (descriptor, b"\x00" + kv[1:]), 2.0)
    assert segment is not None and one.num_unpacking == 1
    with pytest.raises(TransferFailed, match="segment 1 has a wrong digest") as caught:
        one.verify(segment)
    one.broken(segment, caught.value)
    assert one.state is TransferState.FAILED and one.error is caught.value
    assert (one.num_unpacking, one.kv_bytes, one.inflight_bytes) == (0, 0, 0)


def test_a_segment_of_another_request_has_a_wrong_digest() -> None:
    one = accepted()
    kv = bytes(32)
    descriptor = SegmentDescriptor.of(whole(LAYOUT, 0, 2), 32, segment_digest(ID + 1, kv))
    segment = one.on_segment(KvCache(ID, 1, 2), (descriptor.pack(), kv), 2.0)
    assert segment is not None
    with pytest.raises(TransferFailed):
        one.verify(segment)


def test_an_unpack_that_ends_after_the_transfer_counts_for_nothing() -> None:
    one = accepted()
    segment = take(one, 1, 2, *GOOD)
    one.cancel()
    assert one.num_unpacking == 1, "the blocks are not free yet"
    assert one.stored(segment, 3.0) is None
    assert (one.num_unpacking, one.kv_bytes) == (0, 0)


def test_every_frame_renews_the_lease_and_so_does_the_last_byte() -> None:
    one = receiver(offer(2))
    assert one.expired(9.0)
    one.on_keepalive(8.0)
    assert not one.expired(16.9)
    one.claim(9.0)
    assert not one.expired(17.9) and one.expired(18.0)
    one.accept(0, 10.0)
    assert not one.expired(18.9) and one.expired(19.0)
    one.on_keepalive(11.0)
    assert not one.expired(19.9) and one.expired(20.0)
    segment = take(one, 1, 1, *payload(0, 2, 0, 2), now=15.0)
    assert not one.expired(23.9)
    one.stored(segment, 20.0)
    assert one.is_complete
    assert not one.expired(28.9) and one.expired(29.0), "nobody came to decode"


def test_a_prompt_may_be_read_for_leases_before_its_first_segment() -> None:
    one = receiver()
    for now in range(0, 100, 5):  # it waits for blocks, and holds none
        assert not one.expired(now) and one.on_keepalive(now)
    one.accept(0, 100.0)
    for now in range(103, 276, 4):
        assert not one.expired(now) and one.on_keepalive(now)
    assert one.expired(280.0) and one.overdue == "nobody claimed it for 20 leases"
    one.claim(279.5)
    assert not one.expired(288.4) and one.expired(288.5) and one.overdue == "silence for a lease"


def test_kv_that_is_all_held_waits_for_its_prompt_to_be_read() -> None:
    one = accepted(4, cached=4)  # at 1.0, after the first chunk; a lease is 9 s
    assert one.is_complete
    assert not one.expired(180.9), "the prefill worker, which held none of it, still reads"
    assert one.expired(181.0) and one.overdue == "nobody claimed it for 20 leases"


def test_a_sender_that_says_nothing_has_a_lease_for_its_first_segment() -> None:
    one = accepted()  # at 1.0
    assert not one.expired(9.9) and one.expired(10.0) and one.overdue == "silence for a lease"


def test_kv_that_is_never_claimed_has_twenty_leases_whatever_is_said() -> None:
    one = accepted(4)  # at 1.0; a lease is 9 s
    one.stored(take(one, 1, 2, *payload(0, 2, 0, 2)), 2.0)
    for now in range(2, 181, 3):
        assert not one.expired(now) and one.on_keepalive(now)
    assert one.expired(181.0) and one.overdue == "nobody claimed it for 20 leases"
    one.claim(180.5)
    assert not one.expired(189.4) and one.expired(189.5) and one.overdue == "silence for a lease"


def test_times_leave_out_what_the_sender_was_idle() -> None:
    one = accepted()  # at 1.0
    first = take(one, 1, 2, *payload(0, 2, 0, 2, idle_us=3_000_000), now=4.5)
    one.stored(first, 4.75)
    second = take(one, 2, 2, *payload(0, 2, 2, 2, idle_us=99_000_000), now=6.0)
    one.stored(second, 6.25)
    assert one.kv_seconds == 5.25
    assert one.transfer_s == 0.5 + 0.0 + 0.25


def test_our_own_mistakes() -> None:
    with pytest.raises(LocalProtocolError, match="lets no segment in"):
        receiver(credit_bytes=7)
    one = receiver()
    with pytest.raises(LocalProtocolError, match=r"accept\(5\)"):
        one.accept(5, 1.0)
    one.accept(0, 1.0)
    with pytest.raises(LocalProtocolError, match=r"accept\(0\)"):
        one.accept(0, 1.0)
    with pytest.raises(LocalProtocolError, match="given to transfer"):
        one.on_segment(KvCache(ID + 1, 1, 2), GOOD, 1.0)
    segment = take(one, 1, 2, *GOOD)
    one.stored(segment, 2.0)
    with pytest.raises(LocalProtocolError, match="is not being unpacked"):
        one.stored(segment, 2.0)


@given(
    st.integers(0, 2**32 - 1) | st.integers(0, 3),
    st.integers(0, 2**32 - 1) | st.integers(0, 3),
    st.lists(
        st.one_of(
            st.binary(max_size=50),
            st.binary(min_size=48, max_size=48),
            st.builds(
                lambda *fields: SegmentDescriptor(*fields).pack(),
                *[st.integers(0, 2**16 - 1) | st.integers(0, 1)] * 3,
                *[st.integers(0, 2**32 - 1) | st.integers(0, 4)] * 4,
                st.integers(0, 64),
                st.just(0),
            ),
        ),
        max_size=3,
    ),
)
def test_any_segment_is_admitted_or_refused_with_a_remote_protocol_error(
    number: int, of: int, parts: list[bytes]
) -> None:
    one = accepted()
    try:
        segment = one.on_segment(KvCache(ID, number, of), parts, 2.0)
    except RemoteProtocolError:
        assert one.state is TransferState.FAILED
    else:
        assert segment is not None
        assert len(segment.kv) == segment.rectangle.num_bytes(LAYOUT) <= 64


def lent(memory_bytes: int = 100) -> KVReceiver:
    """A receiver that can read so much memory of the sender's."""
    one = receiver(offer(memory="baton-1"))
    assert one.accept(0, 1.0, memory_bytes) == (KvCacheAck(ID, 0), Credit(64, 0, 0, 1))
    return one


def places(*each: int, tokens: int = 2, **changed: int) -> tuple[bytes, bytes]:
    """A segment of the first so many tokens, in memory at these places."""
    fields = {"num_bytes": 16 * tokens, "digest": 5, "in_memory": 1, **changed}
    descriptor = SegmentDescriptor.of(part(LAYOUT, 0, 2, 0, tokens), **fields)
    return descriptor.pack(), pack_places(each)


def test_a_segment_in_memory_is_admitted_verified_by_a_copy_and_stored() -> None:
    one, memory = lent(), bytes(range(100))
    kv = memory[84:100] + memory[3:19]
    frame = KvCache(ID, 1, 2)
    segment = one.on_segment(frame, places(84, 3, digest=segment_digest(ID, kv)), 2.0)
    assert segment is not None and segment.places == (84, 3)
    assert b"".join(segment.pieces(memory)) == kv
    assert one.on_segment(frame, places(84, 3, digest=segment_digest(ID, kv)), 2.0) is None
    one.verify(segment, segment_digest(ID, kv))
    with pytest.raises(TransferFailed, match="wrong digest"):
        one.verify(segment, segment_digest(ID, bytes(32)))
    assert one.stored(segment, 3.0) == (KvCacheAck(ID, 32), Credit(64, 0, 0, 1))
    assert take(one, 2, 2, *payload(0, 2, 2, 2)).pieces(memory) == [bytes([3]) * 32]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (places(0, 85), "outside the memory of 100 bytes"),
        (places(69), "outside the memory"),
        (places(2**64 - 1, 0), "outside the memory"),
        (places(), "0 places for 2 tokens"),
        (places(0, 0, 0), "3 places for 2 tokens"),
        (places(0, 0, num_bytes=16), "32 bytes for"),
        (places(*[0] * 4, tokens=4, num_bytes=2**40), "64 bytes for"),
        ((places(0)[0], bytes(7)), "7 bytes, not n x 8"),
    ],
)
def test_places_that_cannot_be_end_the_transfer(parts: tuple[bytes, bytes], reason: str) -> None:
    one = lent()
    with pytest.raises(RemoteProtocolError, match=reason):
        one.on_segment(KvCache(ID, 1, 2), parts, 2.0)
    assert one.state is TransferState.FAILED and one.num_unpacking == 0


def test_a_segment_in_memory_may_be_larger_than_one_that_is_buffered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MAX_READ_BYTES > MAX_SEGMENT_BYTES
    # That of more tokens takes seconds to offer.
    monkeypatch.setattr("wire.transfer.receiver.MAX_READ_BYTES", most_bytes := 16 << 20)
    most_tokens = most_bytes // 16
    for num_tokens in (most_tokens, most_tokens + 1):
        one = receiver(offer(num_tokens, memory="baton-1"), credit_bytes=1 << 30, max_bytes=1 << 30)
        one.accept(0, 1.0, 16 * num_tokens)
        segment = KvCache(ID, 1, 1), places(0, tokens=num_tokens), 2.0
        if num_tokens == most_tokens:
            assert one.on_segment(*segment) is not None
        else:
            with pytest.raises(RemoteProtocolError, match="16777232 bytes for"):
                one.on_segment(*segment)


def test_memory_that_is_not_read_here_is_no_place_for_segments() -> None:
    with pytest.raises(RemoteProtocolError, match="not read here"):
        accepted().on_segment(KvCache(ID, 1, 2), places(0, 0), 2.0)
    with pytest.raises(LocalProtocolError, match="no memory was offered"):
        receiver().accept(0, 1.0, 100)


def test_what_came_with_the_offer_is_answered_once() -> None:
    one = receiver()
    parts = [payload(0, 2, 0, 3), payload(0, 2, 3, 1)]
    one.check_unasked(parts)
    segments = one.accept_with(parts, 1.0)
    assert [it.rectangle for it in segments] == [whole(LAYOUT, 0, 3), whole(LAYOUT, 3, 1)]
    assert one.num_unpacking == 2
    for segment in segments:
        one.verify(segment)
    waiting = KvCacheAck(ID, 0), Credit(0, 0, 0)
    assert one.on_keepalive(2.0) == waiting
    assert one.stored(segments[1], 2.0) is None
    assert one.on_keepalive(3.0) == waiting  # with credit it would be sent again
    assert one.stored(segments[0], 3.0) == (KvCacheAck(ID, 64), Credit(64, 0, 1))
    assert one.is_complete
    assert one.on_keepalive(4.0) is None


@pytest.mark.parametrize(
    "parts",
    [
        [payload(0, 2, 0, 4, in_memory=1)],
        [payload(0, 2, 0, 3), payload(0, 2, 2, 1)],
        [payload(0, 2, 0, 3)],
        [payload(0, 2, 0, 3), payload(0, 1, 3, 1)],
        [payload(0, 2, 1, 4)],
        [(payload(0, 2, 0, 4)[0], bytes(63))],
    ],
)
def test_what_came_with_the_offer_is_all_of_it_and_as_it_should_be(
    parts: list[tuple[bytes, bytes]],
) -> None:
    one = receiver()
    with pytest.raises(RemoteProtocolError):
        one.accept_with(parts, 1.0)
    assert one.state is TransferState.FAILED
    assert one.num_unpacking == 0  # so its blocks are free


def test_other_kv_than_was_offered_is_refused_before_anything_is_reserved() -> None:
    one = receiver()
    one.check_unasked([])
    with pytest.raises(RemoteProtocolError, match="48 bytes came with an offer of 64"):
        one.check_unasked([payload(0, 2, 0, 3)])


def test_no_segment_comes_with_an_offer_of_no_bytes() -> None:
    group = KVGroup(num_layers=2, num_kv_heads=1, key_dim=4, value_dim=4, dtype="uint8", window=1)
    layout = KVLayout(groups=(group,))
    one = receiver(offer(num_tokens=1, layout=layout, total_bytes=0), layout=layout)
    with pytest.raises(RemoteProtocolError, match="0 bytes came with an offer of 0"):
        one.check_unasked([payload(0, 2, 0, 0)])


# Segments beside the KV socket.

KEY, TOKEN, PORT = bytes(range(32)), bytes(range(32, 64)), 5601


def sealed(number: int = 1, of: int = 1, tokens: int = 4, **changed: int) -> tuple[bytes, bytes]:
    """A sealed segment of zeros, all of the prompt's."""
    descriptor = SegmentDescriptor.of(part(LAYOUT, 0, 2, 0, tokens), 16 * tokens, 0)
    kv = Sealing(KEY).seal(KvCache(ID, number, of), descriptor, bytes(16 * tokens))
    return descriptor._replace(**changed).pack(), kv


def sealing(segment_port: int = PORT) -> KVReceiver:
    one = receiver(offer(key=KEY, token=TOKEN))
    ack = one.accept(0, 1.0, 0, segment_port)
    assert ack is not None and ack[1].segment_port == segment_port
    return one


def test_a_sealed_segment_is_admitted_opened_and_stored() -> None:
    one = sealing()
    segment = one.on_segment(KvCache(ID, 1, 1), sealed(), 2.0, is_beside=True)
    assert segment is not None and one.opened(segment).kv == bytes(64)
    assert one.on_segment(KvCache(ID, 1, 1), sealed(), 2.0, is_beside=True) is None, "a copy"
    ack = one.stored(segment, 3.0)
    assert ack == (KvCacheAck(ID, 64), Credit(64, 0, 1, 0, PORT))


def test_what_does_not_open_fails_closed() -> None:
    one = sealing()
    descriptor, kv = sealed()
    changed = kv[:-1] + bytes([kv[-1] ^ 1])
    segment = one.on_segment(KvCache(ID, 1, 1), (descriptor, changed), 2.0, is_beside=True)
    assert segment is not None
    with pytest.raises(TransferFailed, match="segment 1 is not what was sealed"):
        one.opened(segment)


def test_a_key_is_dropped_at_the_end() -> None:
    one = sealing()
    segment = one.on_segment(KvCache(ID, 1, 1), sealed(), 2.0, is_beside=True)
    one.cancel()
    assert segment is not None and not one.offers_sealing
    with pytest.raises(TransferFailed, match="is over"):
        one.opened(segment)


@pytest.mark.parametrize(
    ("parts", "port", "reason"),
    [
        (sealed(), 0, "where none of this transfer is taken"),
        (sealed(digest=1), PORT, "digest of a sealed segment"),
        (sealed(in_memory=1), PORT, "in memory belong on the KV socket"),
        ((sealed()[0], sealed()[1][:-1]), PORT, "63 bytes for"),
        ((sealed()[0], sealed()[1] + b"x"), PORT, "65 bytes for"),
        ((sealed()[0], b""), PORT, "-16 bytes for"),
    ],
)
def test_what_cannot_have_been_sealed_ends_the_transfer(
    parts: tuple[bytes, bytes], port: int, reason: str
) -> None:
    one = sealing(port)
    with pytest.raises(RemoteProtocolError, match=reason):
        one.on_segment(KvCache(ID, 1, 1), parts, 2.0, is_beside=True)
    assert one.state is TransferState.FAILED and not one.num_unpacking


def test_without_a_key_the_digest_says_what_came() -> None:
    one = receiver(offer(token=TOKEN))
    one.accept(0, 1.0, 0, PORT)
    room = bytearray(64)  # the KV comes when it is admitted
    descriptor, kv = payload(0, 2, 0, 4)
    segment = one.on_segment(KvCache(ID, 1, 1), (descriptor, room), 2.0, is_beside=True)
    assert segment is not None and not segment.is_sealed
    with pytest.raises(TransferFailed, match="wrong digest"):
        one.verify(segment)
    room[:] = kv
    one.verify(segment)


@pytest.mark.parametrize("key", [None, KEY])
def test_no_segment_beside_lies_in_memory_though_some_may(key: bytes | None) -> None:
    """Of its places only the length is known yet."""
    one = receiver(offer(memory="/memory", key=key, token=TOKEN))
    one.accept(0, 1.0, 1024, PORT)
    descriptor, _ = payload(0, 2, 0, 4, in_memory=1)
    with pytest.raises(RemoteProtocolError, match="belong on the KV socket"):
        one.on_segment(KvCache(ID, 1, 1), (descriptor, bytearray(8)), 2.0, is_beside=True)


def test_a_port_answers_a_token_only() -> None:
    with pytest.raises(LocalProtocolError, match="no token was offered"):
        receiver().accept(0, 1.0, 0, PORT)
