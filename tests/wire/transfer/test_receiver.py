"""The decode worker's end of a transfer, step by step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
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
from wire.layout import KVGroup, KVLayout
from wire.parts import Buffer
from wire.payloads import Credit, Offer
from wire.transfer import TransferState
from wire.transfer.receiver import KVReceiver, Segment
from wire.transfer.sealing import Sealing
from wire.transfer.segment import (
    MAX_SEGMENTS,
    SegmentDescriptor,
    pack_places,
    segment_digest,
)

LAYOUT = KVLayout.uniform(
    num_layers=2, num_kv_heads=1, head_dim=4, dtype="uint8"
)  # 16 bytes a token
ID = 5 << 32 | 9
KEY, TOKEN, PORT = bytes(range(32)), bytes(range(32, 64)), 5601


def offer(num_tokens: int = 4, **changed: Any) -> Offer:
    fields: dict[str, Any] = {
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


GOOD = payload(0, 2, 0, 2)


def with_memory(memory_bytes: int = 100) -> KVReceiver:
    """A receiver that can read so much memory of the sender's."""
    one = receiver(offer(memory="baton-1"))
    assert one.accept(0, 1.0, memory_bytes) == (KvCacheAck(ID, 0), Credit(64, 0, 0, 1))
    return one


def places(*each: int, tokens: int = 2, **changed: int) -> tuple[bytes, bytes]:
    """A segment of the first so many tokens, in memory at these places."""
    fields = {"num_bytes": 16 * tokens, "digest": 5, "in_memory": 1, **changed}
    descriptor = SegmentDescriptor.of(part(LAYOUT, 0, 2, 0, tokens), **fields)
    return descriptor.pack(), pack_places(each)


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


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"total_bytes": 63}, ErrorCode.PROTOCOL),
        ({"token_ids": bytes(15)}, ErrorCode.PROTOCOL),
        ({"num_tokens": 2**31 - 1, "token_ids": b""}, ErrorCode.PROTOCOL),
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


@pytest.mark.parametrize(("in_memory", "most_tokens"), [(0, 2), (1, 3)])
def test_a_segment_in_memory_may_be_larger_than_a_buffered_one(
    monkeypatch: pytest.MonkeyPatch, in_memory: int, most_tokens: int
) -> None:
    monkeypatch.setattr("wire.transfer.receiver.MAX_SEGMENT_BYTES", 2 * 16)
    monkeypatch.setattr("wire.transfer.receiver.MAX_READ_BYTES", 3 * 16)
    for num_tokens in (most_tokens, most_tokens + 1):
        one = with_memory()
        parts = places(0, tokens=num_tokens) if in_memory else payload(0, 2, 0, num_tokens)
        number_of = 1 if num_tokens == 4 else 2
        if num_tokens == most_tokens:
            assert one.on_segment(KvCache(ID, 1, number_of), parts, 2.0) is not None
        else:
            with pytest.raises(RemoteProtocolError, match=f"{16 * num_tokens} bytes for"):
                one.on_segment(KvCache(ID, 1, number_of), parts, 2.0)


def test_no_block_is_reserved_past_max_transfer() -> None:
    assert receiver(max_bytes=64)
    with pytest.raises(TransferTooLarge) as caught:
        receiver(max_bytes=63)
    assert (caught.value.size, caught.value.limit) == (64, 63)


def test_the_first_credit_follows_the_reservation() -> None:
    one = receiver(credit_bytes=40)
    assert one.token_ids == (0, 0, 0, 0)
    assert one.on_keepalive(0.5) == (KvCacheAck(ID, 0), Credit(0, 0, 0)), "still waiting"
    assert one.inflight_bytes == 0
    assert one.accept(1, 1.0) == (KvCacheAck(ID, 0), Credit(40, 1, 0))
    assert one.state is TransferState.RECEIVING and one.inflight_bytes == 40
    assert one.on_keepalive(2.0) == (KvCacheAck(ID, 0), Credit(40, 1, 0))


def begun() -> KVReceiver:
    """A receiver with the first of two segments."""
    one = accepted()
    take(one, 1, 2, *GOOD)
    return one


@pytest.mark.parametrize(
    ("make", "number", "of", "parts", "reason"),
    [
        (begun, 0, 2, GOOD, "segment 0 of 2"),
        (begun, 3, 2, GOOD, "segment 3 of 2"),
        (begun, 1, MAX_SEGMENTS + 1, GOOD, "segment 1 of 65537"),
        (begun, 2, 3, GOOD, "num_segments changed"),
        (begun, 2, 2, (), "0 payload parts"),
        (begun, 2, 2, (*GOOD, b""), "3 payload parts"),
        (begun, 2, 2, (b"", b""), "descriptor has 0 bytes"),
        (begun, 2, 2, (GOOD[0][:47],), "descriptor has 47 bytes"),
        (begun, 2, 2, payload(0, 2, 0, 2), "overlaps"),
        (begun, 2, 2, payload(0, 2, 3, 2), "leaves"),
        (begun, 2, 2, payload(1, 1, 2, 2), "cuts the layers"),
        (begun, 2, 2, payload(0, 2, 2, 0), "empty"),
        (begun, 2, 2, payload(0, 2, 2, 2, num_bytes=31), "32 bytes for"),
        (begun, 2, 2, (payload(0, 2, 2, 2)[0], bytes(31)), "31 bytes for"),
        (begun, 1, 2, payload(0, 2, 2, 2), "came twice and differs"),
        (begun, 2, 2, payload(0, 2, 2, 1), "2 of 2 segments came, but 48 of 64 bytes"),
        (receiver, 1, 1, payload(0, 2, 0, 4), "before the first credit"),
        (accepted, 1, 2, payload(0, 2, 0, 4), "1 of 2 segments came, but 64 of 64 bytes"),
        (accepted, 1, 2, places(0, 0), "not read here"),
        (with_memory, 1, 2, places(0, 85), "outside the memory of 100 bytes"),
        (with_memory, 1, 2, places(69), "outside the memory"),
        (with_memory, 1, 2, places(2**64 - 1, 0), "outside the memory"),
        (with_memory, 1, 2, places(), "0 places for 2 tokens"),
        (with_memory, 1, 2, places(0, 0, 0), "3 places for 2 tokens"),
        (with_memory, 1, 2, places(0, 0, num_bytes=16), "32 bytes for"),
        (with_memory, 1, 2, places(*[0] * 4, tokens=4, num_bytes=2**40), "64 bytes for"),
        (with_memory, 1, 2, (places(0)[0], bytes(7)), "7 bytes, not n x 8"),
        (partial(sealing, 0), 1, 1, sealed(), "where none of this transfer is taken"),
        (sealing, 1, 1, sealed(digest=1), "digest of a sealed segment"),
        (sealing, 1, 1, sealed(in_memory=1), "in memory belong on the KV socket"),
        (sealing, 1, 1, (sealed()[0], sealed()[1][:-1]), "63 bytes for"),
        (sealing, 1, 1, (sealed()[0], sealed()[1] + b"x"), "65 bytes for"),
        (sealing, 1, 1, (sealed()[0], b""), "-16 bytes for"),
    ],
)
def test_an_invalid_segment_ends_the_transfer(
    make: Callable[[], KVReceiver], number: int, of: int, parts: tuple[bytes, ...], reason: str
) -> None:
    one = make()
    num_unpacking, is_beside = one.num_unpacking, one.token is not None
    with pytest.raises(RemoteProtocolError, match=reason) as caught:
        one.on_segment(KvCache(ID, number, of), parts, 2.0, is_beside=is_beside)
    assert one.state is TransferState.FAILED and one.error is caught.value
    assert one.num_unpacking == num_unpacking, "nobody brings the invalid one back"


@given(st.data())
def test_a_violation_leaves_only_handed_out_segments_unpacking(
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


def test_no_byte_is_let_in_past_the_credit() -> None:
    one = accepted(credit_bytes=32)
    first = take(one, 1, 4, *payload(0, 2, 0, 1))
    take(one, 2, 4, *payload(0, 2, 1, 1))
    one.stored(first, 2.0)
    take(one, 3, 4, *payload(0, 2, 2, 1))
    with pytest.raises(RemoteProtocolError, match="segment 4 is over the credit"):
        one.on_segment(KvCache(ID, 4, 4), payload(0, 2, 3, 1), 2.0)


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


def test_an_unpack_that_ends_after_the_transfer_counts_for_nothing() -> None:
    one = accepted()
    segment = take(one, 1, 2, b"".join(GOOD))  # one part, as on raw TCP
    one.cancel()
    assert one.num_unpacking == 1, "the blocks are not free yet"
    assert one.stored(segment, 3.0) is None
    assert (one.num_unpacking, one.kv_bytes) == (0, 0)


@given(
    st.sampled_from([0, 4]),
    st.lists(
        st.tuples(
            st.integers(1, 9),
            st.sampled_from(["keepalive", "keepalive", "segment", "accept", "claim"]),
        ),
        max_size=60,
    ),
)
def test_each_frame_renews_the_lease_but_unclaimed_kv_is_held_for_twenty(
    cached: int, events: list[tuple[int, str]]
) -> None:
    one, now, deadline, claim_by = receiver(), 0.0, 9.0, inf  # a lease is 9 s
    for pause_s, event in events:
        now = min(now + pause_s, deadline - 0.5)
        assert not one.expired(now)
        if event == "claim":
            one.claim(now)
            claim_by = inf
        elif event == "accept" and one.state is TransferState.OFFERED:
            one.accept(cached, now)
            claim_by = inf if one.is_claimed else now + 20 * 9
        elif event == "segment" and one.state is TransferState.RECEIVING:
            one.stored(take(one, 1, 1, *payload(0, 2, 0, 4), now=now), now)
            claim_by = inf  # the last byte says that the prompt is read
        elif event == "keepalive" and not one.is_over:
            assert one.on_keepalive(now) is not None
        else:
            continue
        is_all_held = one.is_over and claim_by < inf
        deadline = claim_by if is_all_held else min(now + 9, claim_by)
        if one.is_over:
            break
    assert not one.expired(deadline - 0.1) and one.expired(deadline)
    if deadline == claim_by:
        assert one.overdue == "nobody claimed it for 20 leases"


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
    with pytest.raises(LocalProtocolError, match="no memory was offered"):
        one.accept(0, 1.0, 100)
    with pytest.raises(LocalProtocolError, match="no token was offered"):
        one.accept(0, 1.0, 0, PORT)
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


def test_kv_that_came_with_the_offer_is_acknowledged_once() -> None:
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
def test_kv_with_an_offer_must_be_all_of_it_and_valid(
    parts: list[tuple[bytes, bytes]],
) -> None:
    one = receiver()
    with pytest.raises(RemoteProtocolError):
        one.accept_with(parts, 1.0)
    assert one.state is TransferState.FAILED
    assert one.num_unpacking == 0  # so its blocks are free


def test_kv_of_another_size_than_offered_is_refused_before_blocks_are_reserved() -> None:
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


def test_a_key_is_dropped_at_the_end() -> None:
    one = sealing()
    segment = one.on_segment(KvCache(ID, 1, 1), sealed(), 2.0, is_beside=True)
    one.cancel()
    assert segment is not None and not one.offers_sealing
    with pytest.raises(TransferFailed, match="is over"):
        one.opened(segment)
