"""The decode worker's end of a transfer: credit, checks, acknowledgement, claim.  SPEC 6.

Blocks are reserved before a byte is admitted.  The credit is a window of bytes beyond those stored.
Each segment is checked against the offer, the credit and all earlier segments, then returned once
to be verified and unpacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from struct import unpack
from typing import Final, NamedTuple

from wire.errors import (
    ErrorCode,
    LocalProtocolError,
    RemoteProtocolError,
    TransferFailed,
    TransferTooLarge,
    WireError,
)
from wire.frames import KvCache, KvCacheAck
from wire.layout import KVLayout
from wire.parts import Buffer
from wire.payloads import Credit, Offer
from wire.transfer.lease import Transfer, TransferState
from wire.transfer.sealing import TAG_BYTES, Sealing
from wire.transfer.segment import (
    MAX_READ_BYTES,
    MAX_SEGMENT_BYTES,
    MAX_SEGMENTS,
    Coverage,
    Rectangle,
    SegmentDescriptor,
    segment_digest,
    split_segment,
    unpack_places,
)

Ack = tuple[KvCacheAck, Credit]

# How long a transfer waits for its router's DECODE_REQUEST, which follows the whole prompt.  A
# request has 600 s by default: 20 leases of 30 s.  Prompts that take longer need a longer lease.
UNCLAIMED_LEASES: Final = 20


class Segment(NamedTuple):
    """An admitted segment: verify it, unpack it, then call `stored` or `broken`.

    `kv` holds its bytes (if it `is_sealed`, after `opened`), or its pieces lie at `places` in the
    sender's memory.
    """

    number: int
    descriptor: SegmentDescriptor
    kv: Buffer
    places: tuple[int, ...] = ()
    is_sealed: bool = False

    @property
    def rectangle(self) -> Rectangle:
        return self.descriptor.rectangle

    def pieces(self, memory: Buffer) -> list[memoryview]:
        if not self.places:
            return [memoryview(self.kv)]
        size = self.descriptor.num_bytes // len(self.places)
        return [memoryview(memory)[place : place + size] for place in self.places]


class KVReceiver(Transfer):
    """The decode worker's end.

    Reserve blocks for `token_ids`, then `accept`.  Pass every KV_CACHE to `on_segment` (with a
    payload) or `on_keepalive` (without), and send the ACKs that they return.  Call `claim` when a
    router requests decoding: until then the time is limited.
    """

    def __init__(
        self,
        request_id: int,
        offer: Offer,
        *,
        layout: KVLayout,
        max_bytes: int,
        credit_bytes: int,
        lease_s: float,
        now: float,
        peer: str = "the prefill worker",
    ) -> None:
        """Check the offer against our own `layout` and limits.

        Raises:
            TransferTooLarge: Over `max_bytes`; nothing was reserved.
            RemoteProtocolError: The offer contradicts itself, or its layout is not ours (MISMATCH).
        """
        super().__init__(request_id, lease_s=lease_s, peer=peer, now=now)
        if offer.layout != layout:
            raise RemoteProtocolError(
                f"KV_CACHE: the layout offered is {offer.layout}, ours is {layout}; "
                "both workers must serve the same model with the same KV dtype",
                ErrorCode.MISMATCH,
            )
        if offer.total_bytes != layout.transfer_bytes(offer.num_tokens):
            raise RemoteProtocolError(f"KV_CACHE: total_bytes {offer.total_bytes} is not the sum")
        if len(offer.token_ids) != 4 * offer.num_tokens:
            raise RemoteProtocolError(f"KV_CACHE: token_ids are not {offer.num_tokens} u32")
        if offer.total_bytes > max_bytes:
            raise TransferTooLarge(offer.total_bytes, max_bytes)
        if credit_bytes < layout.piece_bytes:
            raise LocalProtocolError(f"credit_bytes {credit_bytes} lets no segment in")
        self.layout = layout
        self.num_tokens = offer.num_tokens
        self.total_bytes = offer.total_bytes
        self.token_ids: tuple[int, ...] = unpack(f"<{offer.num_tokens}I", offer.token_ids)
        self.is_claimed = False  # a router has requested decoding
        self.cached_tokens = 0
        self.kv_bytes = 0  # stored
        self.transfer_s = 0.0
        self.credit_bytes = credit_bytes  # may still be changed before `accept`
        self.offers_memory = offer.memory is not None
        self.token = offer.token  # opens a connection for segments
        self._sealing = None if offer.key is None else Sealing(offer.key)
        self.segment_port = 0  # for segments on a connection of their own; 0: none
        self._memory_bytes = 0  # of the sender's memory, if its segments may lie there
        self._expected_bytes = 0
        self._admitted_bytes = 0
        self._num_segments = 0
        self._segments: dict[int, SegmentDescriptor] = {}
        self._unpacking: set[int] = set()
        self._coverage = Coverage(layout, 0, 0)
        self._came_unasked = False  # all of it, with the offer
        self._heard_at = now
        self._claim_by = inf

    @property
    def is_complete(self) -> bool:
        """Whether every byte is in its blocks."""
        return self.state is TransferState.DONE

    @property
    def offers_sealing(self) -> bool:
        """Whether segments on a connection of their own are sealed."""
        return self._sealing is not None

    @property
    def skipped_bytes(self) -> int:
        """The part of an accepted transfer that the receiver already holds."""
        return self.total_bytes - self._expected_bytes

    @property
    def num_unpacking(self) -> int:
        """Segments returned and neither `stored` nor `broken`: the blocks are in use until 0."""
        return len(self._unpacking)

    @property
    def overdue(self) -> str:
        """The reason, when `expired` is true."""
        if self._deadline == self._claim_by:
            return f"nobody claimed it for {UNCLAIMED_LEASES} leases"
        if self.is_complete:
            return "nobody claimed it for a lease"
        return "silence for a lease"

    @property
    def inflight_bytes(self) -> int:
        """Bytes that may arrive or are being unpacked."""
        return 0 if self.is_over else self.granted_bytes - self.kv_bytes

    @property
    def kv_seconds(self) -> float:
        """Seconds from the acceptance to the last byte stored."""
        if self.accepted_at is None or self.finished_at is None:
            return 0.0
        return self.finished_at - self.accepted_at

    @property
    def granted_bytes(self) -> int:
        """The credit: KV bytes that may have been sent in all."""
        return min(self.kv_bytes + self.credit_bytes, self._expected_bytes)

    def accept(
        self, cached_tokens: int, now: float, memory_bytes: int = 0, segment_port: int = 0
    ) -> Ack | None:
        """Grant the first credit: blocks are reserved, `cached_tokens` leading tokens are held.

        Args:
            memory_bytes: Size of the sender's memory that can be read here; 0 for none.
            segment_port: Port for segments on a connection of their own; 0 for none.

        Returns:
            The ACK to send; None when the transfer ended meanwhile (free the blocks).
        """
        if self.is_over:
            return None
        if self.state is not TransferState.OFFERED or not 0 <= cached_tokens <= self.num_tokens:
            raise LocalProtocolError(f"accept({cached_tokens}) in {self.state}")
        if memory_bytes and not self.offers_memory:
            raise LocalProtocolError("no memory was offered")
        if segment_port and self.token is None:
            raise LocalProtocolError("no token was offered")
        self.cached_tokens = cached_tokens
        self._memory_bytes, self.segment_port = memory_bytes, segment_port
        self._expected_bytes = self.layout.transfer_bytes(self.num_tokens, cached_tokens)
        self._coverage = Coverage(self.layout, cached_tokens, self.num_tokens)
        self.accepted_at = self._heard_at = now
        if not self.is_claimed:
            self._claim_by = now + UNCLAIMED_LEASES * self.lease_s
        self._renew(now)
        self._move(TransferState.RECEIVING)
        self._finish_if_complete(now)
        return self._ack()

    def check_unasked(self, unasked: Sequence[tuple[Buffer, Buffer]]) -> None:
        """Raise RemoteProtocolError if KV came with the offer, but not all of it."""
        num_bytes = sum(memoryview(kv).nbytes for _, kv in unasked)
        if unasked and not num_bytes == self.total_bytes > 0:
            raise RemoteProtocolError(
                f"KV_CACHE: {num_bytes} bytes came with an offer of {self.total_bytes}"
            )

    def accept_with(self, unasked: Sequence[tuple[Buffer, Buffer]], now: float) -> list[Segment]:
        """Accept all the KV, which came with the offer; return segments to verify and unpack.

        The last one `stored` gives the ACK.  Raises RemoteProtocolError for other KV than offered.
        """
        self._came_unasked = True
        self.accept(0, now)
        segments = []
        try:
            for number, parts in enumerate(unasked, start=1):
                frame = KvCache(self.request_id, number, len(unasked))
                segment = self.on_segment(frame, parts, now)
                assert segment is not None  # each number comes once
                segments.append(segment)
        except RemoteProtocolError:
            self._unpacking.clear()  # none was handed out
            raise
        return segments

    def claim(self, now: float) -> None:
        """Note a router's request for decoding: from here on only the lease limits the time."""
        self.is_claimed, self._claim_by = True, inf
        if not self.is_over:
            self._renew(now)

    def on_keepalive(self, now: float) -> Ack | None:
        """Take a KV_CACHE without payload, or the offer again; return the current ACK."""
        if self.is_over:
            return None
        self._renew(now)
        return self._ack()

    def on_segment(
        self, frame: KvCache, payload: Sequence[Buffer], now: float, *, is_beside: bool = False
    ) -> Segment | None:
        """Admit one segment.

            Args: is_beside: It came to the segment port, sealed if there is a key.  Only the length
            of its KV need be known yet.

        Returns:
            The segment to verify and unpack; None for a duplicate, or after the end.

        Raises:
            RemoteProtocolError: It breaks the offer, the credit or an earlier segment.
        """
        self._check_id(frame.request_id)
        if self.is_over:
            return None
        try:
            segment = self._read(frame, payload, is_beside)
            if segment is not None:
                self._admit(segment, frame.num_segments)
        except RemoteProtocolError as error:
            self.fail(error)
            raise
        self._renew(now)
        if segment is not None:
            self._count_time(now, segment.descriptor.idle_us)
        return segment

    def opened(self, segment: Segment) -> Segment:
        """Return a sealed segment with its KV, or raise TransferFailed.  May run on any thread."""
        sealing = self._sealing
        if sealing is None:
            raise TransferFailed(self.peer, "the transfer is over")
        frame = KvCache(self.request_id, segment.number, self._num_segments)
        kv = sealing.open(frame, segment.descriptor, segment.kv)
        if kv is None:
            raise TransferFailed(self.peer, f"segment {segment.number} is not what was sealed")
        return segment._replace(kv=kv)

    def verify(self, segment: Segment, digest: int | None = None) -> None:
        """Raise TransferFailed if the digest is wrong.  May run on any thread.

        Of a segment in memory, which may change, `digest` is that of the copy that was made.
        """
        if digest is None:
            digest = segment_digest(self.request_id, segment.kv)
        if digest != segment.descriptor.digest:
            raise TransferFailed(self.peer, f"segment {segment.number} has a wrong digest")

    def stored(self, segment: Segment, now: float) -> Ack | None:
        """Note that a segment is verified and in its blocks; return the ACK to send.

        None when the transfer ended meanwhile, or while KV that came with the offer is incomplete.
        """
        self._back(segment)
        if self.is_over:
            return None
        self.kv_bytes += segment.descriptor.num_bytes
        self._finish_if_complete(now)
        return self._ack() if self.is_complete or not self._came_unasked else None

    def broken(self, segment: Segment, error: WireError) -> None:
        """Note that a segment could not be verified or unpacked; the transfer fails."""
        self._back(segment)
        self.fail(error)

    def _read(self, frame: KvCache, payload: Sequence[Buffer], is_beside: bool) -> Segment | None:
        if self.state is not TransferState.RECEIVING:
            raise RemoteProtocolError("KV_CACHE: a segment before the first credit")
        if not 1 <= frame.segment <= frame.num_segments <= MAX_SEGMENTS:
            raise RemoteProtocolError(f"KV_CACHE: segment {frame.segment} of {frame.num_segments}")
        if self._num_segments not in (0, frame.num_segments):
            raise RemoteProtocolError("KV_CACHE: num_segments changed")
        if len(payload) == 2:
            descriptor, kv = SegmentDescriptor.unpack(payload[0]), payload[1]
        elif len(payload) == 1:
            descriptor, kv = split_segment(payload[0])
        else:
            raise RemoteProtocolError(f"KV_CACHE: {len(payload)} payload parts, not 2")
        known = self._segments.get(frame.segment)
        if known is None:
            if is_beside:
                self._check_beside(descriptor)
            places = unpack_places(kv) if descriptor.in_memory else ()
            is_sealed = is_beside and self._sealing is not None
            return Segment(frame.segment, descriptor, kv, places, is_sealed)
        if known != descriptor:
            raise RemoteProtocolError(f"KV_CACHE: segment {frame.segment} came twice and differs")
        return None

    def _admit(self, segment: Segment, num_segments: int) -> None:
        self._coverage.admit(segment.rectangle)
        wanted = segment.rectangle.num_bytes(self.layout)
        in_memory = segment.descriptor.in_memory
        tag_bytes = TAG_BYTES * segment.is_sealed
        num_bytes = wanted if in_memory else memoryview(segment.kv).nbytes - tag_bytes
        most_bytes = MAX_READ_BYTES if in_memory else MAX_SEGMENT_BYTES
        if not num_bytes == segment.descriptor.num_bytes == wanted <= most_bytes:
            raise RemoteProtocolError(f"KV_CACHE: {num_bytes} bytes for {segment.rectangle}")
        if in_memory:
            self._check_places(segment)
        if self._admitted_bytes + num_bytes > self.granted_bytes:
            raise RemoteProtocolError(f"KV_CACHE: segment {segment.number} is over the credit")
        count, admitted = len(self._segments) + 1, self._admitted_bytes + num_bytes
        if (count == num_segments) != (admitted == self._expected_bytes):
            raise RemoteProtocolError(
                f"KV_CACHE: {count} of {num_segments} segments came, but "
                f"{admitted} of {self._expected_bytes} bytes"
            )
        # Nothing may raise from here on: the blocks wait for segments in `_unpacking`.
        self._admitted_bytes = admitted
        self._num_segments = num_segments
        self._segments[segment.number] = segment.descriptor
        self._unpacking.add(segment.number)

    def _check_beside(self, descriptor: SegmentDescriptor) -> None:
        """Refuse frames that do not belong on the segment port; the seal authenticates them."""
        if not self.segment_port:
            raise RemoteProtocolError("KV_CACHE: a segment where none of this transfer is taken")
        if descriptor.in_memory:
            raise RemoteProtocolError("KV_CACHE: segments in memory belong on the KV socket")
        if descriptor.digest and self._sealing is not None:
            raise RemoteProtocolError("KV_CACHE: the digest of a sealed segment is 0")

    def _check_places(self, segment: Segment) -> None:
        """Refuse addresses outside the sender's memory; the digest checks the bytes there."""
        number, num_tokens = len(segment.places), segment.descriptor.num_tokens
        num_bytes = segment.descriptor.num_bytes
        if not self._memory_bytes:
            raise RemoteProtocolError("KV_CACHE: a segment in memory, which is not read here")
        if not number or max(1, num_tokens) % number:
            raise RemoteProtocolError(f"KV_CACHE: {number} places for {num_tokens} tokens")
        if max(segment.places) + num_bytes // number > self._memory_bytes:
            raise RemoteProtocolError(
                f"KV_CACHE: segment {segment.number} lies outside the memory of "
                f"{self._memory_bytes} bytes"
            )

    def _renew(self, now: float) -> None:
        self._deadline = min(now + self.lease_s, self._claim_by)

    def _back(self, segment: Segment) -> None:
        if segment.number not in self._unpacking:
            raise LocalProtocolError(f"segment {segment.number} is not being unpacked")
        self._unpacking.remove(segment.number)

    def _count_time(self, now: float, idle_us: int) -> None:
        self.transfer_s += max(0.0, now - self._heard_at - idle_us / 1e6)
        self._heard_at = now

    def _finish_if_complete(self, now: float) -> None:
        if self.kv_bytes == self._expected_bytes:
            self._move(TransferState.DONE)
            self.finished_at = now
            # Without a byte to send, nothing shows that the prompt has been read.
            is_read = self.is_claimed or self._expected_bytes > 0
            self._deadline = now + self.lease_s if is_read else self._claim_by
            self._count_time(now, 0)

    def _ack(self) -> Ack:
        if self._came_unasked and not self.is_complete:
            return KvCacheAck(self.request_id, 0), Credit(0, 0, 0)  # as if it waited for blocks
        flags = int(self.is_complete), int(self._memory_bytes > 0)
        granted = Credit(self.granted_bytes, self.cached_tokens, *flags, self.segment_port)
        return KvCacheAck(self.request_id, self.kv_bytes), granted
