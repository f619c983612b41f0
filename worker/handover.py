"""One request's KV on its way to a decode worker: `wire.sender` with a cache and a socket.  SPEC 6.

A pump packs the next segment on the transfer thread and sends it without another copy, as long as
there is one that is computed and within the credit.  The hand-over has ended when the transfer is
over and every buffer lent to the socket is back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from wire.aio.zmq import Sending
from wire.errors import ErrorCode, TransferFailed, WireError
from wire.frames import Cancel, KvCache, KvCacheAck
from wire.payloads import Credit
from wire.transfer import KVSender, Rectangle, segment_digest
from worker.copies import Copies
from worker.executor.contract import KVCache
from worker.peers import DecodePeer

log = structlog.get_logger("worker")


class HandOver:
    """The sending end of one transfer; `on_end` is called once, when nothing of it is left."""

    def __init__(
        self,
        sender: KVSender,
        offer: tuple[KvCache, bytes],
        peer: DecodePeer,
        cache: KVCache,
        copies: Copies,
        on_end: Callable[[HandOver], None],
    ) -> None:
        self.sender = sender
        self.peer = peer
        self._offer = offer
        self._cache = cache
        self._copies = copies
        self._on_end = on_end
        self._block_table: tuple[int, ...] = ()
        self._sendings: list[Sending] = []
        self._pump: asyncio.Task[None] | None = None  # none before the offer
        self._wake = asyncio.Event()

    @property
    def request_id(self) -> int:
        return self.sender.request_id

    @property
    def inflight_bytes(self) -> int:
        return 0 if self.sender.is_over else self.sender.kv_bytes - self.sender.acked_bytes

    def start(self, block_table: tuple[int, ...], cached_tokens: int, now: float) -> None:
        """The engine has blocks for the prompt: offer it, and send what is cached already."""
        self._block_table = block_table
        self.peer.receivers[self.request_id] = self
        self.peer.send(*self._offer)
        if cached_tokens:
            self.sender.advance(cached_tokens, now)
        self._pump = asyncio.create_task(self._run(), name=f"hand-over {self.request_id}")

    def advance(self, num_tokens: int, now: float) -> None:
        self.sender.advance(num_tokens, now)
        self._wake.set()

    def on_ack(self, ack: KvCacheAck, credit: Credit) -> None:
        self.sender.on_ack(ack, credit, time.monotonic())
        self._wake.set()

    def on_error(self, code: int, message: str) -> None:
        self.sender.on_error(code, message)
        self._wake.set()

    def fail(self, error: WireError) -> None:
        """It cannot go on: the peer is lost, or says nothing."""
        self.sender.fail(error)
        self._wake.set()

    def cancel(self) -> None:
        """Nobody wants it any more; the decode worker frees what it reserved."""
        if not self.sender.is_over:
            self.sender.cancel()
            if self._pump is not None:
                self.peer.send(Cancel(self.request_id, ErrorCode.CANCELLED))
        self._wake.set()

    def tick(self, now: float) -> None:
        if self._pump is None or self.sender.is_over:
            return  # still queued for blocks: the router's deadline applies, not our lease
        if self.sender.expired(now):
            self.peer.send(Cancel(self.request_id, ErrorCode.TRANSFER_FAILED))
            self.fail(TransferFailed(self.peer.name, "no answer within the lease"))
        elif (frame := self.sender.keepalive(now)) is not None:
            self.peer.send(frame)

    async def _run(self) -> None:
        try:
            while not self.sender.is_over:
                rectangle = self.sender.next_segment()
                if rectangle is None:
                    self._wake.clear()
                    await self._wake.wait()
                else:
                    await self._send_segment(rectangle)
            for sending in self._sendings:
                await sending.wait()
        except Exception:
            log.exception("hand-over broke", request=self.request_id)
            self.peer.send(Cancel(self.request_id, ErrorCode.INTERNAL))
            self.sender.fail(WireError(ErrorCode.INTERNAL, "the hand-over of the KV broke"))
        finally:
            self.peer.receivers.pop(self.request_id, None)
            self._on_end(self)

    async def _send_segment(self, rectangle: Rectangle) -> None:
        kv, digest = await self._copies.run(self._pack, rectangle)
        segment = self.sender.segment(rectangle, kv, time.monotonic(), digest=digest)
        if segment is None:
            return  # ended meanwhile; what was packed may be anyone's by now
        sending = self.peer.send(*segment, track=True)
        self._sendings = [sending for sending in self._sendings if not sending.done]
        if sending is not None:
            self._sendings.append(sending)

    def _pack(self, rectangle: Rectangle) -> tuple[memoryview, int]:
        kv = self._cache.pack(self._block_table, rectangle)
        return kv, segment_digest(self.request_id, kv)
