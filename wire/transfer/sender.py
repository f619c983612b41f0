"""The prefill worker's end of a transfer: sends the offer, segments and keepalives.  SPEC 6.

The first ACK has the number of tokens that the receiver has cached, and the credit, from which the
sender makes a plan of segments.  A segment is sent when its tokens are computed and its size is
within the credit, so that the transfer overlaps with prefill of the rest of the prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from struct import Struct
from typing import Final

from wire.errors import LocalProtocolError, TransferTooLarge
from wire.frames import KvCache, KvCacheAck
from wire.layout import KVLayout
from wire.parts import Buffer
from wire.payloads import Credit, Offer, encode_map
from wire.transfer.lease import Transfer, TransferState
from wire.transfer.sealing import Sealing
from wire.transfer.segment import (
    DEFAULT_SEGMENT_BYTES,
    MAX_READ_BYTES,
    MAX_SEGMENT_BYTES,
    MAX_UNASKED_SEGMENTS,
    Rectangle,
    SegmentDescriptor,
    pack_places,
    plan,
    segment_digest,
)

# After prefill is complete, the transfer may last this many leases, even if the receiver continues
# to send ACKs.  Otherwise a receiver that has ended the request could keep the blocks allocated
# here forever.
HANDOVER_LEASES: Final = 20


class KVSender(Transfer):
    """The prefill worker's end of a transfer.

    Send `offer`, or `offer_with` the KV of the rectangles that `unasked` returns.  After each ACK
    and each `advance`, call `next_segment` until it returns None, copy the KV of each rectangle
    into a buffer, and send what `segment` returns.  If there is a `segment_port`, send what `leave`
    and `protect` return to that port instead.
    """

    def __init__(
        self,
        request_id: int,
        layout: KVLayout,
        token_ids: Sequence[int],
        *,
        max_bytes: int,
        lease_s: float,
        now: float,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        num_shards: int = 1,
        stages: Sequence[Sequence[range]] | None = None,
        block_size: int = 1,
        memory: str | None = None,
        key: bytes | None = None,
        token: bytes | None = None,
        cache_salt: str = "",
        peer: str = "the decode worker",
    ) -> None:
        """Prepare a transfer; the offer is sent later.

        Args:
            num_shards, stages, block_size: See `plan`.
            memory: Name of the Unix socket that passes the descriptor of the KV's shared memory.
            key: Encrypts segments on the segment connection; unique to this transfer.
            token: Authorizes the segment connection.
            cache_salt: That of the request's options.
        """
        super().__init__(request_id, lease_s=lease_s, peer=peer, now=now)
        if not 0 < segment_bytes <= MAX_SEGMENT_BYTES:
            raise LocalProtocolError(f"segment_bytes is {segment_bytes}, not 1 to 4 MiB")
        self.layout = layout
        self.num_tokens = len(token_ids)
        self.total_bytes = layout.transfer_bytes(self.num_tokens)
        self.kv_bytes = 0  # sent
        self.acked_bytes = 0
        self.skipped_tokens = 0  # cached by the receiver
        self.is_in_memory = False  # the receiver can read the KV from shared memory
        self.segment_port = 0  # of the segment connection; 0: none
        self.plan: list[Rectangle] = []  # empty until the first credit
        self._token_ids = token_ids
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._num_shards, self._stages, self._block_size = num_shards, stages, block_size
        self._memory, self._cache_salt = memory, cache_salt
        self.token = token
        self._key = key
        self._is_sealing = key is not None
        self._sealing = None if key is None else Sealing(key)
        self._credit = 0
        self.went_unasked = False  # all the KV was sent with the offer
        self._claimed_bytes = 0
        self._num_claimed = 0
        self._claimed: dict[Rectangle, int] = {}
        # `_computed_tokens[i]` tokens were computed by `_computed_at[i]`; both lists ascend.
        self._computed_tokens: list[int] = []
        self._computed_at: list[float] = []
        self._end_by = inf
        self._idle_since = now
        self._keepalive_at = now + lease_s / 3

    @property
    def skipped_bytes(self) -> int:
        """Size in bytes of the KV that the receiver already had."""
        return self.total_bytes - self.layout.transfer_bytes(self.num_tokens, self.skipped_tokens)

    def offer(self) -> tuple[KvCache, bytes]:
        """Return the offer (segment 0).  Raises TransferTooLarge if the KV exceeds `max_bytes`."""
        if self.total_bytes > self._max_bytes:
            error = TransferTooLarge(self.total_bytes, self._max_bytes)
            self.fail(error)
            raise error
        offer = Offer(
            layout=self.layout,
            num_tokens=self.num_tokens,
            total_bytes=self.total_bytes,
            token_ids=Struct(f"<{self.num_tokens}I").pack(*self._token_ids),
            memory=self._memory,
            key=self._key,
            token=self.token,
            cache_salt=self._cache_salt,
        )
        self._key = None
        return KvCache(self.request_id, 0, 0), encode_map(offer)

    def unasked(self, most_bytes: int) -> list[Rectangle]:
        """Return the rectangles whose KV should be sent with the offer ("unasked").

        These are all or none: [] if the KV is not computed yet, or larger than `most_bytes`.
        """
        if self._num_computed < self.num_tokens or self.total_bytes > most_bytes:
            return []
        segment_bytes = max(self._segment_bytes, self.layout.piece_bytes)
        rectangles = self._cut(0, segment_bytes)
        return rectangles if len(rectangles) <= MAX_UNASKED_SEGMENTS else []

    def offer_with(
        self, unasked: Sequence[tuple[Rectangle, Buffer, int]]
    ) -> tuple[KvCache, list[Buffer]]:
        """Return an offer together with all the KV, given as (rectangle, KV, digest)."""
        frame, offer = self.offer()
        payload: list[Buffer] = [offer]
        for rectangle, kv, digest in unasked:
            descriptor = SegmentDescriptor.of(rectangle, memoryview(kv).nbytes, digest)
            payload += [descriptor.pack(), kv]
        self.went_unasked = bool(unasked)
        return KvCache(frame.request_id, 0, len(unasked)), payload

    def on_ack(self, ack: KvCacheAck, credit: Credit, now: float) -> None:
        """Handle an ACK, which may be a duplicate or out of order.  Raises RemoteProtocolError."""
        self._check_id(ack.request_id)
        if self.is_over:
            return
        self._check_ack(ack, credit)
        self._deadline = min(now + self.lease_s, self._end_by)
        self._keepalive_at = now + self.lease_s / 3
        if credit.credit == 0 and not credit.ready:
            return  # the offer waits for blocks
        if self.accepted_at is None:
            self._accepted(credit, now)
        self._credit = max(self._credit, credit.credit)
        self.kv_bytes = max(self.kv_bytes, ack.kv_bytes)  # KV sent with the offer counts if stored
        self.acked_bytes = max(self.acked_bytes, ack.kv_bytes)
        if credit.ready and self._move(TransferState.DONE):
            self.finished_at = now

    def advance(self, num_tokens: int, now: float) -> None:
        """Record that the KV of the first `num_tokens` tokens has been computed."""
        if num_tokens > self.num_tokens:
            raise LocalProtocolError(f"{num_tokens} tokens computed of {self.num_tokens}")
        if num_tokens > self._num_computed:
            self._computed_tokens.append(num_tokens)
            self._computed_at.append(now)
            if num_tokens == self.num_tokens:
                self._end_by = now + HANDOVER_LEASES * self.lease_s

    def next_segment(self, ahead_bytes: int = 0) -> Rectangle | None:
        """Claim the next rectangle that is computed and within the credit, if any.

        With `ahead_bytes`, the credit may be exceeded by that much, to copy the KV into a buffer
        ahead of time; the segment may be sent only once it `has_credit`.
        """
        if self.state is not TransferState.SENDING or self._num_claimed == len(self.plan):
            return None
        rectangle = self.plan[self._num_claimed]
        num_bytes = rectangle.num_bytes(self.layout)
        if self._num_computed < rectangle.tokens.stop:
            return None
        if self._claimed_bytes + num_bytes > self._credit + ahead_bytes:
            return None
        self._num_claimed += 1
        self._claimed_bytes += num_bytes
        self._claimed[rectangle] = self._num_claimed
        return rectangle

    def has_credit(self, rectangle: Rectangle) -> bool:
        """Whether the credit allows to send this rectangle next."""
        return self.kv_bytes + rectangle.num_bytes(self.layout) <= self._credit

    def segment(
        self,
        rectangle: Rectangle,
        kv: Buffer,
        now: float,
        *,
        digest: int | None = None,
        places: Sequence[int] = (),
    ) -> tuple[KvCache, bytes, Buffer] | None:
        """Return the frame and payload parts of a claimed rectangle; None if the transfer is over.

        `digest` is `segment_digest(kv)` if another thread has computed it.  If `is_in_memory`,
        `places` may give the offsets of equal chunks of the KV in shared memory; then `kv` is only
        used for its digest.
        """
        num_bytes = rectangle.num_bytes(self.layout)
        if not (places or memoryview(kv).nbytes == num_bytes):
            raise LocalProtocolError(f"{len(kv)} bytes for {rectangle}, which has {num_bytes}")
        if places and not self.is_in_memory:
            raise LocalProtocolError("the receiver does not read the KV where it lies")
        if (leaving := self.leave(rectangle, now)) is None:
            return None
        frame, descriptor = leaving
        digest = segment_digest(self.request_id, kv) if digest is None else digest
        descriptor = descriptor._replace(digest=digest, in_memory=int(bool(places)))
        return frame, descriptor.pack(), pack_places(places) if places else kv

    def leave(self, rectangle: Rectangle, now: float) -> tuple[KvCache, SegmentDescriptor] | None:
        """Record that a claimed rectangle is sent now; return its frame and descriptor.

        The descriptor has no digest yet.  Returns None if the transfer is over.
        """
        if self.is_over:
            return None
        if not self.has_credit(rectangle):
            raise LocalProtocolError(f"{rectangle} is beyond the credit")
        number = self._claimed.pop(rectangle, None)
        if number is None:
            raise LocalProtocolError(f"{rectangle} is not claimed")
        num_bytes = rectangle.num_bytes(self.layout)
        descriptor = SegmentDescriptor.of(rectangle, num_bytes, 0, self._idle_us(rectangle))
        self.kv_bytes += num_bytes
        self._idle_since = now
        if self.kv_bytes == self.total_bytes - self.skipped_bytes:
            self._move(TransferState.SENT)
        return KvCache(self.request_id, number, len(self.plan)), descriptor

    def protect(
        self, frame: KvCache, descriptor: SegmentDescriptor, kv: Buffer
    ) -> tuple[SegmentDescriptor, Buffer] | None:
        """Encrypt the KV of a segment if there is a key; otherwise add a digest to its descriptor.

        Must be called at most once per segment.  Returns None if the transfer is over, because its
        key has been deleted.  May run on any thread.
        """
        if not self._is_sealing:
            return descriptor._replace(digest=segment_digest(self.request_id, kv)), kv
        sealing = self._sealing
        return None if sealing is None else (descriptor, sealing.seal(frame, descriptor, kv))

    def keepalive(self, now: float) -> KvCache | None:
        """Return a keepalive frame if no ACK has come for a third of a lease, else None.

        The keepalive renews the receiver's lease and its ACK renews ours, while the prompt is being
        prefilled or the offer waits for blocks.
        """
        if self.is_over or now < self._keepalive_at:
            return None
        self._keepalive_at = now + self.lease_s / 3
        return KvCache(self.request_id, 0, 0)

    def _check_ack(self, ack: KvCacheAck, credit: Credit) -> None:
        stored_all = self.went_unasked and self.accepted_at is None and bool(credit.ready)
        sent = self.total_bytes if stored_all else self.kv_bytes
        if ack.kv_bytes > sent:
            raise self._violated(f"KV_CACHE_ACK: {ack.kv_bytes} bytes, but {sent} were sent")
        if credit.credit == 0 and not credit.ready:
            if ack.kv_bytes:
                raise self._violated(
                    "KV_CACHE_ACK: bytes acknowledged of an offer that still waits"
                )
            return
        if credit.cached_tokens > self.num_tokens:
            raise self._violated(
                f"KV_CACHE_ACK: cached_tokens is {credit.cached_tokens} of {self.num_tokens}"
            )
        if credit.in_memory and self._memory is None:
            raise self._violated("KV_CACHE_ACK: in_memory is 1, but no memory was offered")
        if credit.segment_port and self.token is None:
            raise self._violated("KV_CACHE_ACK: segment_port, but no token was offered")
        for name, agreed in (
            ("cached_tokens", self.skipped_tokens),
            ("in_memory", self.is_in_memory),
            ("segment_port", self.segment_port),
        ):
            if self.accepted_at is not None and getattr(credit, name) != agreed:
                raise self._violated(f"KV_CACHE_ACK: {name} changed")
        to_send = self.layout.transfer_bytes(self.num_tokens, credit.cached_tokens)
        if bool(credit.ready) != (ack.kv_bytes == to_send):
            raise self._violated(
                f"KV_CACHE_ACK: ready is {credit.ready} at {ack.kv_bytes} of {to_send} bytes"
            )

    def _accepted(self, credit: Credit, now: float) -> None:
        self.accepted_at = self._idle_since = now
        self.skipped_tokens, self.is_in_memory = credit.cached_tokens, bool(credit.in_memory)
        self.segment_port = credit.segment_port
        if credit.ready:
            return
        try:
            self._make_plan(credit.credit)
        except LocalProtocolError as error:
            sentence = f"KV_CACHE_ACK: credit {credit.credit} is too small: {error.message}"
            raise self._violated(sentence) from error
        self._move(TransferState.SENDING)

    def _make_plan(self, credit_bytes: int) -> None:
        segment_bytes, read_bytes = self._segment_bytes, 0
        if self.is_in_memory:  # segments need no buffers: prefer few large ones
            segment_bytes = min(MAX_SEGMENT_BYTES, max(segment_bytes, credit_bytes // 4))
            read_bytes = min(MAX_READ_BYTES, credit_bytes, max(segment_bytes, credit_bytes // 2))
        segment_bytes = min(max(segment_bytes, self.layout.piece_bytes), credit_bytes)
        self.plan = self._cut(self.skipped_tokens, segment_bytes, read_bytes)

    @property
    def _num_computed(self) -> int:
        return self._computed_tokens[-1] if self._computed_tokens else 0

    def _cut(self, cached_tokens: int, segment_bytes: int, read_bytes: int = 0) -> list[Rectangle]:
        return plan(
            *(self.layout, cached_tokens, self.num_tokens, segment_bytes),
            *(self._num_shards, self._stages, self._block_size, read_bytes),
        )

    def _idle_us(self, rectangle: Rectangle) -> int:
        computed = self._computed_at[bisect_left(self._computed_tokens, rectangle.tokens.stop)]
        return max(0, round((computed - self._idle_since) * 1e6))
