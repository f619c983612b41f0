"""A whole transfer over a network that delays, repeats, corrupts, cancels and dies.

The network model is harsher than ZeroMQ (which drops nothing inside a connection and repeats
nothing): frames on each way may be delivered late, twice, and in any order.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import wire.transfer
from wire.errors import ErrorCode, RemoteProtocolError, TransferFailed, WireError
from wire.frames import KvCache, KvCacheAck
from wire.layout import KVGroup, KVLayout, StateGroup
from wire.parts import Buffer
from wire.payloads import Credit, Offer, decode_map
from wire.transfer import (
    KVReceiver,
    KVSender,
    Rectangle,
    Segment,
    SegmentDescriptor,
    TransferState,
    segment_digest,
    unasked_segments,
)
from wire.transfer.segment import DESCRIPTOR

LEASE_S = 10.0
REQUEST_ID = 7 << 32 | 1


# Group, layer, head, token; of a state its position.
Place = tuple[int, int, int, int]

FULL = KVGroup(num_layers=2, num_kv_heads=2, key_dim=2, value_dim=2, dtype="uint8")
WINDOWED = KVGroup(num_layers=1, num_kv_heads=2, key_dim=3, value_dim=1, dtype="uint8", window=4)
STATE = StateGroup(num_layers=2, num_heads=2, head_bytes=4)
LAYOUTS = [
    KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="uint8"),
    KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, dtype="uint8"),
    KVLayout(groups=(FULL, WINDOWED)),
    KVLayout(groups=(STATE, FULL)),
    KVLayout(groups=(WINDOWED, STATE, FULL)),
]


def places_of(layout: KVLayout, rectangle: Rectangle) -> list[Place]:
    group, layers, heads, tokens = rectangle
    is_state = isinstance(layout.groups[group], StateGroup)
    positions = [tokens.start] if is_state else tokens
    return [(group, *it) for it in itertools.product(layers, heads, positions)]


def row_of(layout: KVLayout, place: Place) -> bytes:
    """KV whose every byte tells its place apart."""
    group, layer, head, token = place
    number = 61 * group + 31 * layer + 17 * head + 7 * token + 1
    return bytes([number % 256]) * layout.groups[group].head_bytes


def kv_of(layout: KVLayout, rectangle: Rectangle) -> bytes:
    return b"".join(row_of(layout, place) for place in places_of(layout, rectangle))


@dataclass
class Blocks:
    """The receiver's memory, which notices a second write and a write outside."""

    layout: KVLayout
    cached_tokens: int
    num_tokens: int
    rows: dict[Place, bytes] = field(default_factory=dict)

    def unpack(self, rectangle: Rectangle, kv: bytes) -> None:
        wanted = self.wanted()
        size = self.layout.groups[rectangle.group].head_bytes
        for place in places_of(self.layout, rectangle):
            assert place in wanted, "a write outside"
            assert place not in self.rows, "a second write"
            self.rows[place], kv = kv[:size], kv[size:]
        assert not kv

    def wanted(self) -> dict[Place, bytes]:
        if self.cached_tokens == self.num_tokens:
            return {}
        places = [
            place
            for index, group in enumerate(self.layout.groups)
            for place in places_of(
                self.layout,
                Rectangle(
                    index,
                    range(group.num_layers),
                    range(group.num_heads),
                    group.sent(self.cached_tokens, self.num_tokens),
                ),
            )
        ]
        return {place: row_of(self.layout, place) for place in places}

    def is_right(self) -> bool:
        return self.rows == self.wanted()


Parts = tuple[KvCache, bytes, Buffer]
Frame = tuple[str, tuple[Any, ...]]


SETUPS = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(LAYOUTS),
        "num_tokens": st.sampled_from([7, 5, 12, 1, 2, 9]),
        "cached": st.sampled_from([0, 0, 1, 0, 3, 2, 12]),
        "segment_bytes": st.integers(8, 60),
        "credit_bytes": st.integers(8, 150),
        "num_shards": st.integers(1, 3),
        "is_hostile": st.sampled_from([True, True, False]),
        "head_start": st.sampled_from([2, 4, 0, 3, 6]),
        "with_offer": st.booleans(),
        "is_kept": st.sampled_from([True, True, False]),
        "flip": st.sampled_from([0, 0, 0, 1]),
    }
)


@settings(
    max_examples=100,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
class LossyTransfer(RuleBasedStateMachine):
    """One sender, one receiver, two bags of frames under way, and a clock."""

    @initialize(setup=SETUPS)
    def start(self, setup: dict[str, Any]) -> None:
        self.is_hostile = setup["is_hostile"]
        self.layout, num_tokens = setup["layout"], setup["num_tokens"]
        self.now = 0.0
        self.sender = KVSender(
            REQUEST_ID,
            self.layout,
            range(num_tokens),
            max_bytes=1 << 20,
            lease_s=LEASE_S,
            segment_bytes=setup["segment_bytes"],
            num_shards=setup["num_shards"],
            now=0.0,
        )
        self.credit_bytes = setup["credit_bytes"]
        self.cached = min(setup["cached"], num_tokens)
        self.blocks = Blocks(self.layout, self.cached, num_tokens)
        self.receiver: KVReceiver | None = None
        self.computed = 0
        self.packing: list[Rectangle] = []
        self.unpacking: list[Segment] = []
        self.to_receiver: list[Frame] = []
        self.to_sender: list[Frame] = []
        self.sent: list[Frame] = []
        self.is_tampered = False
        self.most_credit = 0
        self.spoil: Callable[[Parts], Parts] | None = None
        self.is_kept = setup["is_kept"] and not self.cached
        self.unasked: list[tuple[Buffer, Buffer]] = []
        if setup["with_offer"]:
            self.compute(num_tokens)
        self.offer(setup["flip"] if self.is_hostile else 0)
        self.go_on(1, setup["head_start"])

    def offer(self, flip: int) -> None:
        """Offer; if all is computed and within the credit, send it along, perhaps changed."""
        cuts = [(it, kv_of(self.layout, it)) for it in self.sender.unasked(self.credit_bytes)]
        digests = [segment_digest(REQUEST_ID, kv) for _, kv in cuts]
        if cuts and flip:
            rectangle, kv = cuts[-1]
            cuts[-1] = rectangle, bytes([kv[0] ^ flip]) + kv[1:]
            self.is_tampered = True
        each = [(*cut, digest) for cut, digest in zip(cuts, digests, strict=True)]
        header, payload = self.sender.offer_with(each)
        self.to_receiver.append(("kv", (header, *payload)))

    # The sender's own doing.

    @rule(num_tokens=st.integers(1, 6))
    def compute(self, num_tokens: int) -> None:
        self.computed = min(self.computed + num_tokens, self.sender.num_tokens)
        self.sender.advance(self.computed, self.now)

    @rule()
    def claim(self) -> None:
        while (rectangle := self.sender.next_segment()) is not None:
            assert rectangle.tokens.stop <= self.computed
            self.packing.append(rectangle)

    @precondition(lambda self: self.packing)
    @rule(which=st.integers(0, 100))
    def send(self, which: int) -> None:
        rectangle = self.packing.pop(which % len(self.packing))
        parts = self.sender.segment(rectangle, kv_of(self.layout, rectangle), self.now)
        if parts is None:
            assert self.sender.is_over
        else:
            if self.spoil is not None:
                parts, self.spoil, self.is_tampered = self.spoil(parts), None, True
            self.to_receiver.append(("kv", parts))
            self.sent.append(("kv", parts))

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 100))
    def repeat(self, which: int) -> None:
        """Send a segment again, long after the first time perhaps."""
        self.to_receiver.append(self.sent[which % len(self.sent)])

    @rule()
    def keep_alive(self) -> None:
        frame = self.sender.keepalive(self.now)
        if frame is not None:
            self.to_receiver.append(("kv", (frame,)))

    # The receiver's own doing.

    @precondition(lambda self: self.receiver and self.receiver.state is TransferState.OFFERED)
    @rule()
    def reserve(self) -> None:
        assert self.receiver is not None
        if self.unasked and self.is_kept:
            self.unpacking += self.receiver.accept_with(self.unasked, self.now)
        else:
            self.answer(self.receiver.accept(self.cached, self.now))

    @precondition(lambda self: self.unpacking)
    @rule(which=st.integers(0, 100))
    def store(self, which: int) -> None:
        assert self.receiver is not None
        segment = self.unpacking.pop(which % len(self.unpacking))
        try:
            self.receiver.verify(segment)
        except TransferFailed as error:
            assert self.is_tampered
            self.receiver.broken(segment, error)
            self.nack(error)
            return
        if not self.receiver.is_over:
            self.blocks.unpack(segment.rectangle, bytes(segment.kv))
        self.answer(self.receiver.stored(segment, self.now))

    # The network's.

    @precondition(lambda self: self.to_receiver)
    @rule(which=st.integers(0, 100), again=st.booleans())
    def deliver_to_receiver(self, which: int, again: bool) -> None:
        index = which % len(self.to_receiver)
        kind, frame = self.to_receiver[index] if again else self.to_receiver.pop(index)
        if kind == "error":
            if self.receiver is not None:
                self.receiver.on_error(*frame)
            return
        header, *payload = frame
        if header.segment == 0:
            self.offered(header, payload)
            return
        if self.receiver is None:
            return
        try:
            segment = self.receiver.on_segment(header, payload, self.now)
        except RemoteProtocolError as error:
            # A reordered network lets a segment overtake nothing but the offer, never the credit.
            assert self.is_tampered
            self.nack(error)
            return
        if segment is not None:
            self.unpacking.append(segment)

    def offered(self, header: KvCache, payload: list[Any]) -> None:
        if self.receiver is not None:
            self.answer(self.receiver.on_keepalive(self.now))
        elif payload:
            self.unasked = unasked_segments(header, payload, self.credit_bytes)
            self.receiver = KVReceiver(
                REQUEST_ID,
                decode_map(Offer, payload[0]),
                layout=self.layout,
                max_bytes=1 << 20,
                credit_bytes=self.credit_bytes,
                lease_s=LEASE_S,
                now=self.now,
            )

    @precondition(lambda self: self.to_sender)
    @rule(which=st.integers(0, 100), again=st.booleans())
    def deliver_to_sender(self, which: int, again: bool) -> None:
        index = which % len(self.to_sender)
        kind, frame = self.to_sender[index] if again else self.to_sender.pop(index)
        if kind == "error":
            self.sender.on_error(*frame)
        else:
            ack, credit = frame
            try:
                self.sender.on_ack(
                    KvCacheAck.from_header(ack.header()), Credit.unpack(credit.pack()), self.now
                )
            except RemoteProtocolError as error:
                # An intruder's bytes were acknowledged: the sender knows it never sent them.
                assert self.is_tampered
                self.to_receiver.append(("error", (error.code, error.message)))

    @precondition(lambda self: self.is_hostile)
    @rule(at=st.integers(0, 10_000), flip=st.integers(1, 255))
    def corrupt(self, at: int, flip: int) -> None:
        """Flip bits of the next segment's KV."""

        def spoil(parts: Parts) -> Parts:
            header, descriptor, kv = parts
            spoiled = bytearray(kv)
            spoiled[at % len(spoiled)] ^= flip
            return header, descriptor, bytes(spoiled)

        self.spoil = spoil

    @precondition(lambda self: self.is_hostile)
    @rule(at=st.integers(0, DESCRIPTOR.size - 9), value=st.integers(0, 255))
    def forge(self, at: int, value: int) -> None:
        """Change the next descriptor (not `idle_us`, which is a claim and not checked)."""

        def spoil(parts: Parts) -> Parts:
            header, descriptor, kv = parts
            return header, descriptor[:at] + bytes([value]) + descriptor[at + 1 :], kv

        self.spoil = spoil

    @rule(num_tokens=st.integers(0, 4), times=st.integers(1, 6))
    def go_on(self, num_tokens: int, times: int) -> None:
        """Let each thing that can happen happen once, the honest way, some times over."""
        for _ in range(times):
            if num_tokens:
                self.compute(num_tokens)
            self.claim()
            if self.packing:
                self.send(0)
            if self.to_receiver:
                self.deliver_to_receiver(0, False)
            if self.receiver is not None and self.receiver.state is TransferState.OFFERED:
                self.reserve()
            if self.unpacking:
                self.store(0)
            if self.to_sender:
                self.deliver_to_sender(0, False)

    # Ends.

    @precondition(lambda self: self.is_hostile and self.receiver and self.sender.plan)
    @rule(
        which=st.integers(0, 30),
        number=st.integers(0, 3),
        shift=st.tuples(*[st.sampled_from([0, 0, 0, 0, 0, 1, -1])] * 7),
    )
    def intrude(self, which: int, number: int, shift: tuple[int, ...]) -> None:
        """Send a well-formed segment out of turn: over the credit, overlapping, or outside."""
        num_segments = len(self.sender.plan)
        planned = self.sender.plan[which % num_segments]
        honest = SegmentDescriptor.of(planned, 0, 0)[:7]
        fields = [max(0, one + by) for one, by in zip(honest, shift, strict=True)]
        forged = SegmentDescriptor._make((*fields, 0, 0, 0, 0))
        rectangle = forged.rectangle
        number = num_segments - number % num_segments  # a high one is not taken yet
        is_known = rectangle.group < len(self.layout.groups)
        kv = kv_of(self.layout, rectangle) if is_known else bytes(8)
        descriptor = forged._replace(num_bytes=len(kv), digest=segment_digest(REQUEST_ID, kv))
        header = KvCache(REQUEST_ID, number, num_segments)
        self.to_receiver.insert(0, ("kv", (header, descriptor.pack(), kv)))
        self.is_tampered = True

    @rule(chance=st.integers(0, 19))
    def cancel_sender(self, chance: int) -> None:
        if chance:
            return
        self.sender.cancel()
        self.to_receiver.append(("error", (ErrorCode.CANCELLED, "cancelled")))

    @precondition(lambda self: self.receiver)
    @rule(chance=st.integers(0, 19))
    def cancel_receiver(self, chance: int) -> None:
        if chance:
            return
        assert self.receiver is not None
        self.receiver.cancel()
        self.to_sender.append(("error", (ErrorCode.CANCELLED, "cancelled")))

    @rule(tenths=st.integers(0, 12))
    def wait(self, tenths: int) -> None:
        self.now += LEASE_S * tenths / 10 if tenths > 10 else 0.01 * tenths
        self.expire()

    def expire(self) -> None:
        for end in (self.sender, self.receiver):
            if end is not None and not end.is_over and end.expired(self.now):
                end.fail(TransferFailed(end.peer, "lease expired"))

    def answer(self, ack: tuple[KvCacheAck, Credit] | None) -> None:
        if ack is not None:
            self.to_sender.append(("ack", ack))

    def nack(self, error: WireError) -> None:
        self.to_sender.append(("error", (error.code, error.message)))

    # What always holds.

    @invariant()
    def credit_is_conserved(self) -> None:
        if getattr(self, "receiver", None) is None:
            return
        assert self.receiver is not None
        expected = self.layout.transfer_bytes(self.sender.num_tokens, self.cached)
        credit = self.receiver.granted_bytes
        assert self.most_credit <= credit <= expected, "credit shrank or outgrew the transfer"
        self.most_credit = credit
        assert credit - self.receiver.kv_bytes <= self.credit_bytes
        admitted = sum(segment.descriptor.num_bytes for segment in self.unpacking)
        assert self.receiver.is_over or admitted <= self.credit_bytes, "admitted over the credit"
        unpacked = sum(len(row) for row in self.blocks.rows.values())
        assert self.receiver.kv_bytes == unpacked or self.receiver.is_over
        assert self.sender.acked_bytes <= min(self.receiver.kv_bytes, self.sender.kv_bytes)
        assert self.receiver.num_unpacking == len(self.unpacking)

    @invariant()
    def done_means_every_byte_is_right(self) -> None:
        if getattr(self, "receiver", None) is None:
            return
        assert self.receiver is not None
        if self.receiver.is_complete:
            assert self.blocks.is_right()
            assert self.receiver.inflight_bytes == 0
        if self.sender.state is TransferState.DONE:
            assert self.receiver.is_complete
            assert self.receiver.kv_bytes == self.sender.kv_bytes

    def teardown(self) -> None:
        """Left alone, both ends reach an end; helped, an honest transfer is DONE at both."""
        if not hasattr(self, "sender"):
            return
        was_ended = self.sender.is_over or bool(self.receiver and self.receiver.is_over)
        for _ in range(200):
            self.go_on(12, 12)
            self.credit_is_conserved()
            self.done_means_every_byte_is_right()
            if self.sender.is_over:
                break
        if not was_ended and not self.is_tampered:
            assert self.sender.state is TransferState.DONE
        self.now += LEASE_S + 1
        self.expire()
        assert self.sender.is_over
        assert self.receiver is None or self.receiver.is_over
        assert not self.unpacking


TestLossyTransfer = LossyTransfer.TestCase


def test_late_frames_of_an_ended_transfer_change_nothing() -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, dtype="uint8")
    sender = KVSender(REQUEST_ID, layout, range(4), max_bytes=64, lease_s=LEASE_S, now=0.0)
    _, offer = sender.offer()
    receiver = KVReceiver(
        REQUEST_ID,
        decode_map(Offer, offer),
        layout=layout,
        max_bytes=64,
        credit_bytes=64,
        lease_s=LEASE_S,
        now=0.0,
    )
    accepted = receiver.accept(0, 1.0)
    assert accepted is not None
    sender.on_ack(*accepted, 2.0)
    sender.advance(4, 3.0)
    rectangle = sender.next_segment()
    assert rectangle is not None
    parts = sender.segment(rectangle, kv_of(layout, rectangle), 4.0)
    assert parts is not None
    receiver.cancel()
    assert receiver.on_segment(parts[0], parts[1:], 5.0) is None
    assert receiver.on_keepalive(5.0) is None
    assert receiver.accept(0, 5.0) is None
    assert receiver.kv_bytes == 0
    sender.on_error(ErrorCode.CANCELLED, "gone")
    before = (sender.state, sender.acked_bytes, sender.error)
    sender.on_ack(KvCacheAck(REQUEST_ID, 99), Credit(99, 0, 1), 6.0)
    sender.cancel()
    assert (sender.state, sender.acked_bytes, sender.error) == before
    assert sender.keepalive(1e9) is None and not sender.expired(1e9)


def test_the_product_imports_from_the_package_and_not_from_its_modules() -> None:
    root = Path(__file__).resolve().parents[3]
    imports = re.compile(r"from wire\.transfer(\.\w+)? import (\([^)]*\)|.*)")
    asked: set[str] = set()
    for package in ("wire", "router", "worker"):
        for path in (root / package).rglob("*.py"):
            if path.parent == root / "wire" / "transfer":
                continue
            for room, names in imports.findall(path.read_text()):
                assert not room, f"{path.relative_to(root)} imports wire.transfer{room}"
                asked |= set(re.findall(r"\w+", names))
    assert {"KVSender", "KVReceiver"} <= asked <= vars(wire.transfer).keys()
