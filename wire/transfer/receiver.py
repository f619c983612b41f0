"""The decode worker's end of a transfer: grants credit, checks segments, sends ACKs.  SPEC 6.

Blocks are reserved before any KV is admitted.  The credit exceeds the stored bytes by a fixed
window.  Each segment is checked against the offer, the credit and all earlier segments, and then
returned to the caller, which verifies its digest and unpacks it into blocks.
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

# How many segments of a transfer have their times kept, for `wire.timeline`.
MAX_TIMED: Final = 64

# After this many leases without a DECODE_REQUEST from the router, which it sends when the prompt
# has been prefilled, the transfer expires.  The default is 20 x 30 s, the default deadline of a
# request.  Prompts that take longer need a longer lease.
UNCLAIMED_LEASES: Final = 20


class Segment(NamedTuple):
    """An admitted segment, to be verified and unpacked; then call `stored` or `broken`.

    `kv` has its KV, encrypted if `is_sealed` (then call `opened`).  If `places` is not empty, the
    KV is in the sender's shared memory instead, in chunks of equal size at these byte offsets.
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
    """The decode worker's end of a transfer.

    Reserve blocks for `token_ids`, then call `accept`.  Pass each KV_CACHE frame to `on_segment`
    (with a payload) or `on_keepalive` (without), and send the ACKs that `stored` and `on_keepalive`
    return.  Call `claim` when the router sends DECODE_REQUEST; unclaimed transfers expire.
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
        """Check the offer against this worker's `layout` and limits.

        Raises:
            TransferTooLarge: The KV is larger than `max_bytes`.
            RemoteProtocolError: The offer is inconsistent, or its layout differs (MISMATCH).
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
        self.cache_salt = offer.cache_salt
        self.is_claimed = False  # the router has sent DECODE_REQUEST
        self.cached_tokens = 0
        self.kv_bytes = 0  # stored in blocks
        self.transfer_s = 0.0
        self.credit_bytes = credit_bytes  # may still be changed before `accept`
        self.offers_memory = offer.memory is not None
        self.token = offer.token  # authorizes a segment connection
        self._sealing = None if offer.key is None else Sealing(offer.key)
        self.segment_port = 0  # of the segment connection; 0: none
        self._memory_bytes = 0  # size of the sender's shared memory, 0 if it is not readable here
        self._expected_bytes = 0
        self._admitted_bytes = 0
        self._num_segments = 0
        self._segments: dict[int, SegmentDescriptor] = {}
        self._unpacking: dict[int, float] = {}  # when they were admitted, by number
        self.segment_times: list[tuple[float, float, int]] = []  # admitted, stored, bytes
        self._coverage = Coverage(layout, 0, 0)
        self._came_unasked = False  # all the KV came with the offer
        self._last_segment_at = now
        self._claim_by = inf

    @property
    def is_complete(self) -> bool:
        """Whether all the KV is stored in blocks."""
        return self.state is TransferState.DONE

    @property
    def offers_sealing(self) -> bool:
        """Whether the offer has a key, which encrypts segments on a segment connection."""
        return self._sealing is not None

    @property
    def skipped_bytes(self) -> int:
        """Size in bytes of the KV of an accepted transfer that the receiver already had."""
        return self.total_bytes - self._expected_bytes

    @property
    def num_segments(self) -> int:
        """Number of segments of the transfer; 0 if it has none, or none has come yet."""
        return self._num_segments

    @property
    def num_unpacking(self) -> int:
        """Number of segments being unpacked; until it is 0, the blocks must not be freed."""
        return len(self._unpacking)

    @property
    def overdue(self) -> str:
        """Why the transfer has expired, for an error message; only valid if `expired`."""
        if self._deadline == self._claim_by:
            return f"nobody claimed it for {UNCLAIMED_LEASES} leases"
        if self.is_complete:
            return "nobody claimed it for a lease"
        return "silence for a lease"

    @property
    def inflight_bytes(self) -> int:
        """Number of KV bytes that are granted but not stored yet."""
        return 0 if self.is_over else self.granted_bytes - self.kv_bytes

    @property
    def kv_seconds(self) -> float:
        """How long the transfer took, in seconds, from acceptance until all KV was stored."""
        if self.accepted_at is None or self.finished_at is None:
            return 0.0
        return self.finished_at - self.accepted_at

    @property
    def granted_bytes(self) -> int:
        """The credit: the total number of KV bytes that the sender may send."""
        return min(self.kv_bytes + self.credit_bytes, self._expected_bytes)

    def accept(
        self, cached_tokens: int, now: float, memory_bytes: int = 0, segment_port: int = 0
    ) -> Ack | None:
        """Grant the first credit, after blocks have been reserved.

        Args:
            cached_tokens: Number of leading tokens whose KV this worker has already.
            memory_bytes: Size of the sender's shared memory if it is mapped here; 0 for none.
            segment_port: Port for a segment connection; 0 for none.

        Returns:
            The ACK to send; None if the transfer has ended meanwhile (free the blocks).
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
        self.accepted_at = self._last_segment_at = now
        if not self.is_claimed:
            self._claim_by = now + UNCLAIMED_LEASES * self.lease_s
        self._renew(now)
        self._move(TransferState.RECEIVING)
        self._finish_if_complete(now)
        return self._ack()

    def check_unasked(self, unasked: Sequence[tuple[Buffer, Buffer]]) -> None:
        """Raise RemoteProtocolError if some KV came with the offer, but not all of it."""
        num_bytes = sum(memoryview(kv).nbytes for _, kv in unasked)
        if unasked and not num_bytes == self.total_bytes > 0:
            raise RemoteProtocolError(
                f"KV_CACHE: {num_bytes} bytes came with an offer of {self.total_bytes}"
            )

    def accept_with(self, unasked: Sequence[tuple[Buffer, Buffer]], now: float) -> list[Segment]:
        """Accept a transfer whose KV came with the offer; return segments to verify and unpack.

        `stored` returns the ACK for the last segment.  Raises RemoteProtocolError if the segments
        do not match the offer.
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
            self._unpacking.clear()  # the caller gets no segment to unpack
            raise
        return segments

    def claim(self, now: float) -> None:
        """Record that the router sent DECODE_REQUEST.  From now on only the lease can expire."""
        self.is_claimed, self._claim_by = True, inf
        if not self.is_over:
            self._renew(now)

    def on_keepalive(self, now: float) -> Ack | None:
        """Handle a KV_CACHE without payload, or a repeated offer; return the current ACK."""
        if self.is_over:
            return None
        self._renew(now)
        return self._ack()

    def on_segment(
        self, frame: KvCache, payload: Sequence[Buffer], now: float, *, is_beside: bool = False
    ) -> Segment | None:
        """Admit one segment.

        Args:
            is_beside: Whether the segment came by the segment connection, encrypted if there is a
                key.  Then only the length of the KV buffer is read here; its bytes may come later.

        Returns:
            The segment to verify and unpack; None for a duplicate, or after the end.

        Raises:
            RemoteProtocolError: The segment conflicts with the offer, credit or earlier segments.
        """
        self._check_id(frame.request_id)
        if self.is_over:
            return None
        try:
            segment = self._read(frame, payload, is_beside)
            if segment is not None:
                self._admit(segment, frame.num_segments, now)
        except RemoteProtocolError as error:
            self.fail(error)
            raise
        self._renew(now)
        if segment is not None:
            self._count_time(now, segment.descriptor.idle_us)
        return segment

    def opened(self, segment: Segment) -> Segment:
        """Decrypt a sealed segment.  Raises TransferFailed.  May run on any thread."""
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

        For a segment in shared memory, which the sender can change at any time, pass the `digest`
        of the copy that was made of it.
        """
        if digest is None:
            digest = segment_digest(self.request_id, segment.kv)
        if digest != segment.descriptor.digest:
            raise TransferFailed(self.peer, f"segment {segment.number} has a wrong digest")

    def stored(self, segment: Segment, now: float) -> Ack | None:
        """Record that a segment is verified and stored in blocks; return the ACK to send.

        Returns None if the transfer has ended, or if the KV came with the offer and further
        segments of it are still being unpacked.
        """
        admitted_at, num_bytes = self._end_unpacking(segment), segment.descriptor.num_bytes
        if self.is_over:
            return None
        self.kv_bytes += num_bytes
        if len(self.segment_times) < MAX_TIMED:
            self.segment_times.append((admitted_at, now, num_bytes))
        self._finish_if_complete(now)
        return self._ack() if self.is_complete or not self._came_unasked else None

    def broken(self, segment: Segment, error: WireError) -> None:
        """Fail the transfer because a segment could not be verified or unpacked."""
        self._end_unpacking(segment)
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

    def _admit(self, segment: Segment, num_segments: int, now: float) -> None:
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
        # Nothing may raise from here on: blocks are not freed until `_unpacking` is empty.
        self._admitted_bytes = admitted
        self._num_segments = num_segments
        self._segments[segment.number] = segment.descriptor
        self._unpacking[segment.number] = now

    def _check_beside(self, descriptor: SegmentDescriptor) -> None:
        """Reject segments that may not be sent by the segment connection."""
        if not self.segment_port:
            raise RemoteProtocolError("KV_CACHE: a segment where none of this transfer is taken")
        if descriptor.in_memory:
            raise RemoteProtocolError("KV_CACHE: segments in memory belong on the KV socket")
        if descriptor.digest and self._sealing is not None:
            raise RemoteProtocolError("KV_CACHE: the digest of a sealed segment is 0")

    def _check_places(self, segment: Segment) -> None:
        """Reject offsets outside the sender's memory.  The digest verifies the content later."""
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

    def _end_unpacking(self, segment: Segment) -> float:
        """Return when the segment was admitted."""
        if segment.number not in self._unpacking:
            raise LocalProtocolError(f"segment {segment.number} is not being unpacked")
        return self._unpacking.pop(segment.number)

    def _count_time(self, now: float, idle_us: int) -> None:
        self.transfer_s += max(0.0, now - self._last_segment_at - idle_us / 1e6)
        self._last_segment_at = now

    def _finish_if_complete(self, now: float) -> None:
        if self.kv_bytes == self._expected_bytes:
            self._move(TransferState.DONE)
            self.finished_at = now
            # The last segment shows that the prompt is prefilled.  If everything was cached there
            # are no segments, and DECODE_REQUEST may still take long.
            is_prefilled = self.is_claimed or self._expected_bytes > 0
            self._deadline = now + self.lease_s if is_prefilled else self._claim_by
            self._count_time(now, 0)

    def _ack(self) -> Ack:
        if self._came_unasked and not self.is_complete:
            # The same ACK as for an offer that waits for blocks.
            return KvCacheAck(self.request_id, 0), Credit(0, 0, 0)
        flags = int(self.is_complete), int(self._memory_bytes > 0)
        granted = Credit(self.granted_bytes, self.cached_tokens, *flags, self.segment_port)
        return KvCacheAck(self.request_id, self.kv_bytes), granted
