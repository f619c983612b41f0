"""Outgoing KV of one request: connects its `KVSender` to a cache and a socket.

`run` sends each segment once its KV is computed and there is credit.  A segment is sent from its
blocks without a copy if they are contiguous in host memory; otherwise a transfer thread, or the
thread of a segment connection, packs it.  So the caller must not free the blocks before `run` has
returned: by then the sockets have released all buffers.  SPEC 6.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import structlog

from wire.aio.zmq import Sending
from wire.errors import ErrorCode, RemoteProtocolError, TransferFailed, WireError
from wire.frames import Cancel, KvCache, KvCacheAck, Tag
from wire.parts import Buffer
from wire.payloads import Credit
from wire.transfer import KVSender, Rectangle, SegmentDescriptor, segment_digest, segment_head
from worker.compute.contract import KVCache
from worker.engine.windows import table_of
from worker.environment import Copying
from worker.transfer.in_memory import find
from worker.transfer.peers import DecodePeer
from worker.transfer.segment_link import send_all

log = structlog.get_logger("worker")

# Bytes that a transfer thread reads in one job.
BATCH_BYTES: Final = 8 << 20
# How far KV in shared memory is read beyond the credit.  That is cheap: only its digest is kept.
AHEAD_BYTES: Final = 16 << 20


class Read(NamedTuple):
    """A segment ready to be sent: its bytes, or its blocks' `offsets` in shared memory."""

    rectangle: Rectangle
    kv: Buffer
    digest: int
    offsets: tuple[int, ...] = ()


Announced = tuple[Rectangle, KvCache, SegmentDescriptor]


class OutgoingTransfer:
    """The sending end of one transfer; `on_end` is called once, when it is done or has failed.

    `make_sender(now)` creates its `KVSender`.  It is called again for the offer, because the lease
    must start with the offer, not while the request still waits for blocks.
    """

    def __init__(
        self,
        make_sender: Callable[[float], KVSender],
        peer: DecodePeer,
        cache: KVCache,
        copies: Copying,
        on_end: Callable[[OutgoingTransfer], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sender = make_sender(clock())
        self.peer = peer
        self._make_sender = make_sender
        self._cache = cache
        self._copies = copies
        self._clock = clock
        self._on_end = on_end
        self._block_table: tuple[int, ...] = ()
        self.is_offered = False
        self.problem: Exception | None = None
        self._num_messages = 0  # received from the peer before the offer
        self._sendings: list[Sending] = []
        self._wake = asyncio.Event()

    @property
    def request_id(self) -> int:
        return self.sender.request_id

    @property
    def inflight_bytes(self) -> int:
        return 0 if self.sender.is_over else self.sender.kv_bytes - self.sender.acked_bytes

    @property
    def is_taken_unasked(self) -> bool:
        """Whether the KV is small enough to be sent with the offer."""
        return self.sender.total_bytes <= self.peer.detail.kv_unasked_bytes

    def offer(self, block_table: tuple[int, ...], num_tokens: int, now: float) -> None:
        """Prepare to offer the KV, of which `num_tokens` are computed; call `run` next."""
        self.sender = self._make_sender(now)
        self._block_table = block_table
        self._num_messages = self.peer.num_messages
        self.is_offered = True
        self.peer.receivers[self.request_id] = self
        if num_tokens:
            self.sender.advance(num_tokens, now)

    async def run(self) -> None:
        """Send until the transfer is over, then wait until every buffer is released."""
        try:
            await self._send_offer()
            await self._send_all()
        except WireError as error:
            self.fail(error)
        except Exception as problem:
            self.problem = problem
            if not self.sender.is_over:
                log.exception("transfer broke", request=self.request_id)
                self.fail(WireError(ErrorCode.INTERNAL, "the transfer of the KV broke"))
        del self.peer.receivers[self.request_id]
        self._on_end(self)
        for sending in self._sendings:
            await sending.wait()

    def advance(self, num_tokens: int, now: float) -> None:
        self.sender.advance(num_tokens, now)
        self._wake.set()

    # Replies of the decode worker, and other reasons for the transfer's end.

    def on_ack(self, ack: KvCacheAck, credit: Credit) -> None:
        try:
            self.sender.on_ack(ack, credit, self._clock())
        except RemoteProtocolError as error:  # the transfer has failed
            log.warning("bad ACK", request=self.request_id, reason=error.message)
            self.peer.tell(Cancel(self.request_id, error.code))
        port = 0 if self.sender.is_in_memory else self.sender.segment_port
        if port and self.peer.segments is not None:
            self.peer.segments.open(port, self.sender.token)
        self._wake.set()

    def on_error(self, code: int, message: str) -> None:
        """Fail the transfer: the decode worker has ended it and freed its blocks."""
        self.sender.on_error(code, message)
        self._wake.set()

    def fail(self, error: WireError) -> None:
        if not self.sender.is_over:
            self.sender.fail(error)
            self._cancel_remote(error.code)

    def cancel(self) -> None:
        if not self.sender.is_over:
            self.sender.cancel()
            self._cancel_remote(ErrorCode.CANCELLED)

    def tick(self, now: float) -> None:
        if not self.is_offered or self.sender.is_over:
            return
        if self.sender.expired(now):
            self.peer.is_mute = self.peer.num_messages == self._num_messages
            self.fail(TransferFailed(self.peer.name, "no answer within the lease"))
        elif (keepalive := self.sender.keepalive(now)) is not None:
            self.peer.tell(keepalive)

    def _cancel_remote(self, code: int) -> None:
        """Send CANCEL if the KV was offered, so that the decode worker frees its blocks."""
        if self.is_offered:
            self.peer.tell(Cancel(self.request_id, code))
        self._wake.set()

    # Segments.

    async def _send_offer(self) -> None:
        """Send the offer, and all the KV with it if it is computed and small enough."""
        unasked = self.sender.unasked(self.peer.detail.kv_unasked_bytes)
        read = await self._run_read(unasked) if unasked else []
        if self.sender.is_over:
            return  # CANCEL was sent already
        if self.peer.segments is not None:
            self.sender.token = self.peer.segments.token  # it changes when a connection ends
        if not read or not self.peer.is_up:  # queued KV would keep its blocks until the link is up
            self.peer.tell(*self.sender.offer())
            return
        segments = [(each.rectangle, each.kv, each.digest) for each in read]
        frame, payload = self.sender.offer_with(segments)
        self._keep(self.peer.send(frame, *payload, track=True))

    def _run_read(self, batch: list[Rectangle]) -> Awaitable[list[Read]]:
        num_bytes = sum(rectangle.num_bytes(self.sender.layout) for rectangle in batch)
        return self._copies.run(self._read, batch, num_bytes=num_bytes)

    async def _send_all(self) -> None:
        """Keep the transfer threads reading, and send segments in order."""
        reading: deque[asyncio.Future[list[Read]]] = deque()
        try:
            while not self.sender.is_over:
                # One job more than threads, so that no thread waits for the event loop.
                while len(reading) <= self._copies.num_at_once and (batch := self._next_batch()):
                    reading.append(asyncio.ensure_future(self._start(batch)))
                if reading:
                    for read in await reading.popleft():
                        while not (self.sender.is_over or self.sender.has_credit(read.rectangle)):
                            await self._wait_for_wake()
                        self._send_segment(read)
                else:
                    await self._wait_for_wake()
        finally:
            await asyncio.gather(*reading, return_exceptions=True)

    async def _wait_for_wake(self) -> None:
        """Wait for a reply of the decode worker, for more computed KV, or for the end."""
        self._wake.clear()
        await self._wake.wait()

    def _start(self, batch: list[Rectangle]) -> Awaitable[list[Read]]:
        """Start reading a batch; with a segment connection, its thread also sends the batch."""
        link = None if self.sender.is_in_memory else self.peer.segments
        if not self.sender.segment_port or link is None or not link.is_up:
            return self._run_read(batch)
        now = self._clock()
        frames = ((rectangle, self.sender.leave(rectangle, now)) for rectangle in batch)
        # A frame is None if the transfer has ended meanwhile.
        announced = [(rectangle, *frame) for rectangle, frame in frames if frame is not None]
        link.traffic.sent[Tag.KV_CACHE] += len(announced)
        num_bytes = sum(descriptor.num_bytes for _, _, descriptor in announced)
        return link.run(self._read_and_send, announced, num_bytes=num_bytes)

    def _read_and_send(self, connected: socket.socket, announced: list[Announced]) -> list[Read]:
        for rectangle, frame, descriptor in announced:
            protected = self.sender.protect(frame, descriptor, self._kv(rectangle))
            if protected is None or self.sender.is_over:
                break
            descriptor, kv = protected
            head = segment_head(frame, descriptor, memoryview(kv).nbytes)
            send_all(connected, [head, kv])
        return []  # nothing is left for the event loop to send

    def _next_batch(self) -> list[Rectangle]:
        """Claim the next segments for a transfer thread: several if there is only one thread."""
        batch: list[Rectangle] = []
        num_bytes, most = 0, BATCH_BYTES if self._copies.num_at_once == 1 else 1
        ahead = AHEAD_BYTES if self.sender.is_in_memory else 0
        while num_bytes < most and (rectangle := self.sender.next_segment(ahead)) is not None:
            batch.append(rectangle)
            num_bytes += rectangle.num_bytes(self.sender.layout)
        return batch

    def _send_segment(self, read: Read) -> None:
        segment = self.sender.segment(
            *(read.rectangle, read.kv, self._clock()), digest=read.digest, places=read.offsets
        )
        if segment is None:
            return  # the transfer ended meanwhile
        self._keep(self.peer.send(*segment, track=True))

    def _keep(self, sending: Sending | None) -> None:
        self._sendings = [sending for sending in self._sendings if not sending.done]
        if sending is not None:
            self._sendings.append(sending)

    def _read(self, batch: list[Rectangle]) -> list[Read]:
        return [self._read_one(rectangle) for rectangle in batch]

    def _read_one(self, rectangle: Rectangle) -> Read:
        if self.sender.is_in_memory:
            found = find(self._cache, self._block_table, rectangle, self.request_id)
            if found is not None:
                offsets, digest = found
                return Read(rectangle, b"", digest, offsets)
        kv = self._kv(rectangle)
        return Read(rectangle, kv, segment_digest(self.request_id, kv))

    def _kv(self, rectangle: Rectangle) -> Buffer:
        """Return a rectangle's bytes: without a copy if they are contiguous, else packed."""
        table = table_of(self._cache, rectangle.group, self._block_table)
        kv = self._cache.view(table, rectangle)
        return self._cache.pack(table, rectangle) if kv is None else kv
