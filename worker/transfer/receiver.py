"""Incoming KV of a worker: connects each `KVReceiver` to a socket, the engine and a cache.

An offer first waits for its share of --max-kv-inflight-bytes.  Then it waits until the engine has
allocated blocks, or until KV of the same prompt has arrived (`worker.engine.reservations`).  Then
the sender gets credit.  KV that came with the offer is kept if the share is free at once; otherwise
it is dropped, and the sender sends it again when it has credit.  Transfer threads verify and unpack
segments.  If a transfer ends early, its blocks are freed once no copy writes to them.  A complete
transfer is kept for one lease at most, until the decode role takes its blocks over.

Workers of any role may send offers.  Until a router claims an offer, its KV is not shared, equal
prompts wait for it only briefly, and all unclaimed offers together may only use a part of the
memory, each for a limited time.  SPEC 6.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import structlog

from wire.errors import ErrorCode, PeerLost, RemoteProtocolError, TransferFailed, WireError
from wire.frames import Cancel, Error, Frame, KvCache
from wire.identity import Identity
from wire.parts import Buffer, Message, decode, encode
from wire.payloads import ErrorDetail, Offer, decode_map, encode_map
from wire.transfer import MAX_READ_BYTES, Ack, KVReceiver, Segment, unasked_segments
from worker.compute.device_errors import report_copy
from worker.engine.engine import Engine
from worker.engine.outputs import Reserved
from worker.environment import WorkerContext
from worker.transfer.budget import TransferBudget
from worker.transfer.incoming import Arrival, IncomingTransfer, store, store_all
from worker.transfer.same_host_peers import SameHostPeers
from worker.transfer.segment_hub import SegmentHub

log = structlog.get_logger("worker")

# Bytes that a transfer thread stores in one job, acknowledged by one ACK: half of the default
# credit, so that the sender does not run out of credit.
BATCH_BYTES: Final = 8 << 20
# Maximum credit of a transfer through shared memory, by kind of memory: in bytes, and as a divisor
# of --max-kv-inflight-bytes.  It allows reading one segment while the next one is announced.
READ_CREDIT_BYTES: Final = {"host": (32 << 20, 8), "cuda": (2 * MAX_READ_BYTES, 4)}
# How many ids of ended transfers are remembered: more than can end while an offer is on its way.
MAX_ENDED: Final = 4096
# Simultaneous offers of one peer: four routers times 256 requests per worker, the default.
MAX_OFFERS: Final = 1024
# How long equal prompts wait for KV that is complete but unclaimed.  A router claims it at once
# unless its client is slow, and requests of other clients must not wait for a slow client.
SHARED_S: Final = 0.5
# Maximum number of tokens in the unclaimed offers of one peer: 80 MB at 40 bytes per token.
MAX_OFFERED_TOKENS: Final = 1 << 21
NO_TRANSFER: Final = "there is no such transfer here"


class IncomingTransfers:
    """All incoming transfers, and the sockets that they arrive on.

    `is_claimed(receiver)` returns whether a router has already claimed an offer, or raises
    WireError to refuse it.
    """

    def __init__(
        self,
        context: WorkerContext,
        is_claimed: Callable[[KVReceiver], bool],
        on_complete: Callable[[int], None],
        on_failed: Callable[[int, WireError], None],
    ) -> None:
        self._config = config = context.config
        self._is_encrypted = context.plane.is_encrypted
        self.lease_s = config.lease_s or 30.0  # replaced at the first WELCOME, before any offer
        self._cache = context.cache
        self._engine = context.engine
        self._copies = context.copies
        self._clock = context.outside.clock
        self._is_claimed = is_claimed
        self._on_complete = on_complete
        self._on_failed = on_failed
        self._transfers: dict[int, IncomingTransfer] = {}
        self.budget = TransferBudget(config.max_kv_inflight_bytes, self._reserve)
        self._arrived: deque[tuple[IncomingTransfer, Segment]] = deque()
        self._stores: set[asyncio.Task[None]] = set()
        is_on = config.kv_shared_memory == "auto"
        self._same_host = SameHostPeers(context.cache, context.outside.fetch, is_on=is_on)
        self._mappings: set[asyncio.Task[None]] = set()
        # Ids of ended transfers, oldest first.  They include transfers whose offer has not arrived
        # yet: a router's CANCEL may overtake the offer, which uses another socket.
        self._ended: dict[int, None] = {}
        self.lost_epochs: dict[str, int] = {}  # of lost routers, by endpoint: their KV is refused
        self._hub = context.plane.hub(self._on_message, self._on_lost)
        bound = self._hub.bind(config.kv_bind)
        self.endpoint = config.kv_advertise or bound
        self._segments: SegmentHub[Arrival] | None = None
        self._segment_traffic = context.segment_traffic
        if config.kv_segment_port != "off" and bound.startswith("tcp://"):
            host = bound.removeprefix("tcp://").rpartition(":")[0]
            port = 0 if config.kv_segment_port == "auto" else int(config.kv_segment_port)
            self._segments = SegmentHub(host, port, self)

    @property
    def inflight_bytes(self) -> int:
        return sum(transfer.receiver.inflight_bytes for transfer in self._transfers.values())

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._transfers))  # a copy: transfers may end during the iteration

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._transfers

    def claim(self, request_id: int) -> None:
        """Record that a router has claimed this transfer."""
        transfer = self._transfers[request_id]
        transfer.receiver.claim(self._clock())
        self.budget.claim(transfer)
        self._engine.post(lambda engine: engine.claim(request_id))

    def take(self, request_id: int) -> KVReceiver:
        """Remove a complete transfer; its blocks now belong to the engine's sequence."""
        self._note_end(request_id)  # refuses a second copy of the offer, if there is one
        return self._transfers.pop(request_id).receiver

    def get(self, request_id: int) -> KVReceiver | None:
        transfer = self._transfers.get(request_id)
        return None if transfer is None else transfer.receiver

    def on_reserved(self, reserved: Reserved) -> None:
        """Accept a transfer after the engine has allocated its blocks: grant the first credit."""
        transfer = self._transfers.get(reserved.request_id)
        if transfer is None:
            return  # ended meanwhile: `_free_blocks` frees its blocks
        transfer.block_table, receiver = reserved.block_table, transfer.receiver
        unasked, transfer.unasked = transfer.unasked, []
        if unasked and not reserved.cached_tokens:
            self._store_unasked(transfer, unasked)
            return
        memory_bytes = 0 if transfer.memory is None else len(transfer.memory)
        port = self._segment_port(receiver)
        ack = receiver.accept(reserved.cached_tokens, self._clock(), memory_bytes, port)
        self._acknowledge(transfer, ack)

    def fail(self, request_id: int, error: WireError) -> None:
        """End a transfer with an error, sent to the peer and reported to the decode role."""
        if transfer := self._transfers.get(request_id):
            self._refuse(transfer.peer, request_id, error)
            self._end(transfer, error)

    def has_ended(self, request_id: int) -> bool:
        """Whether a transfer with this id was taken or ended recently; a new offer is refused."""
        return request_id in self._ended

    def cancel(self, request_id: int) -> None:
        """End a transfer, and refuse an offer with its id that arrives later."""
        self._note_end(request_id)
        if transfer := self._transfers.get(request_id):
            transfer.receiver.cancel()
            error = WireError(ErrorCode.CANCELLED, "the request was cancelled")
            self._refuse(transfer.peer, request_id, error)
            self._drop(transfer)

    def tick(self, now: float) -> None:
        for request_id, transfer in list(self._transfers.items()):
            receiver = transfer.receiver
            if receiver.expired(now):
                self.fail(request_id, TransferFailed(receiver.peer, receiver.overdue))
            elif not transfer.is_waited_for or receiver.is_claimed:
                continue
            elif receiver.finished_at is not None and now - receiver.finished_at >= SHARED_S:
                transfer.is_waited_for = False
                self._engine.post(partial(Engine.let_others_pass, request_id=request_id))

    def check(self) -> None:
        """Assert that every byte of the budget is free or reserved by a transfer."""
        transfers, limit = self._transfers.values(), self._config.max_kv_inflight_bytes
        shares = sum(transfer.share_bytes for transfer in transfers)
        assert self.budget.free_bytes + shares == limit, (self.budget.free_bytes, shares, limit)
        assert self.inflight_bytes <= limit, (self.inflight_bytes, limit)
        for each in transfers:
            kept_bytes = sum(memoryview(kv).nbytes for _, kv in each.unasked)
            assert kept_bytes <= each.share_bytes, (kept_bytes, each.share_bytes)

    async def close(self) -> None:
        leaving = WireError(ErrorCode.DRAINING, "the decode worker is leaving")
        for request_id in self:
            self.fail(request_id, leaving)
        self._same_host.close()
        await asyncio.gather(*self._mappings, return_exceptions=True)
        while self._stores:  # a task that ends may start the next one
            await asyncio.gather(*self._stores, return_exceptions=True)
        if self._segments is not None:
            await self._segments.close()
        await self._hub.close(0.5)

    # Frames of the workers that send KV.

    def _on_message(self, peer: bytes, parts: list[Buffer]) -> None:
        request_id = 0
        try:
            Identity.parse(peer)  # any worker may prefill, and so send KV
            message = decode(parts)
            match frame := message.frame:
                case KvCache():
                    request_id = frame.request_id
                    self._on_kv_cache(peer, frame, message)
                case Cancel():
                    self._on_cancel(peer, frame.request_id)
                case Error():
                    log.warning("error from a worker that sends KV", request=frame.request_id)
                case _:
                    raise RemoteProtocolError(f"{frame.tag.name} is not a frame of the KV plane")
        except WireError as error:
            log.warning("frame refused", request=request_id, reason=error.message)
            self._refuse(peer, request_id, error)

    def _on_kv_cache(self, peer: bytes, frame: KvCache, message: Message) -> None:
        transfer, most_bytes = self._transfers.get(frame.request_id), self._config.kv_unasked_bytes
        unasked = [] if frame.segment else unasked_segments(frame, message.payload, most_bytes)
        if transfer is None and frame.segment == 0 and message.payload:
            self._on_offer(peer, frame.request_id, message, unasked)
        elif transfer is None or transfer.peer != peer:
            raise WireError(ErrorCode.UNKNOWN_REQUEST, NO_TRANSFER)
        elif frame.segment == 0:
            self._acknowledge(transfer, transfer.receiver.on_keepalive(self._clock()))
        elif (segment := self._admit(transfer, frame, message.payload)) is not None:
            self._arrived.append((transfer, segment))
            self._store_next()

    def _admit(
        self,
        transfer: IncomingTransfer,
        frame: KvCache,
        payload: tuple[Buffer, ...],
        *,
        is_beside: bool = False,
    ) -> Segment | None:
        try:
            return transfer.receiver.on_segment(frame, payload, self._clock(), is_beside=is_beside)
        except WireError as error:
            self.fail(frame.request_id, error)
            return None

    # Segments on segment connections (`worker.transfer.segment_hub.SegmentHandler`).

    def admit(self, peer: bytes, frame: KvCache, descriptor: Buffer, kv: Buffer) -> Arrival | None:
        self._segment_traffic.received[frame.tag] += 1
        transfer = self._transfers.get(frame.request_id)
        if transfer is None or transfer.peer != peer:
            log.debug("segment of no transfer", request=frame.request_id)
            return None
        segment = self._admit(transfer, frame, (descriptor, kv), is_beside=True)
        if segment is None:
            return None
        arrival = Arrival(transfer, segment)
        transfer.arrivals.add(arrival)
        return arrival

    def store(self, arrival: Arrival) -> Exception | None:
        if not arrival.acquire():
            return None
        return store(self._cache, arrival.transfer, arrival.segment)

    def stored(self, arrival: Arrival, problem: Exception | None, *, is_last: bool) -> None:
        transfer, segment = arrival.transfer, arrival.segment
        if arrival not in transfer.arrivals:
            return  # dropped
        transfer.arrivals.discard(arrival)
        if problem is not None:
            self._reject(transfer, segment, problem)
        else:
            receiver = transfer.receiver
            ack = receiver.stored(segment, self._clock())
            # If more segments are waiting, the sender still has credit, so skip some ACKs.
            if ack is not None and (is_last or receiver.is_complete or transfer.is_ack_due):
                self._acknowledge(transfer, ack)
        self._free_blocks(transfer)

    def _segment_port(self, receiver: KVReceiver) -> int:
        """Return the port for this transfer's segment connection; 0 for none."""
        if self._segments is None or receiver.token is None:
            return 0
        return self._segments.port if receiver.offers_sealing == self._is_encrypted else 0

    def _on_offer(
        self, peer: bytes, request_id: int, message: Message, unasked: list[tuple[Buffer, Buffer]]
    ) -> None:
        """Begin a transfer; `unasked` are the segments that came with the offer, without credit."""
        if request_id in self._ended or request_id >> 32 in self.lost_epochs.values():
            raise WireError(ErrorCode.UNKNOWN_REQUEST, NO_TRANSFER)
        offer = decode_map(Offer, message.payload[0] if unasked else message.body())
        self._check_limits(peer, offer.num_tokens)
        receiver = KVReceiver(
            request_id,
            offer,
            layout=self._cache.layout,
            max_bytes=self._config.max_kv_transfer_bytes,
            credit_bytes=self._config.credit_bytes,
            lease_s=self.lease_s,
            now=self._clock(),
            peer=str(Identity.parse(peer)),
        )
        if self._is_claimed(receiver):
            receiver.claim(self._clock())
        receiver.check_unasked(unasked)
        transfer = IncomingTransfer(peer, receiver)
        self._transfers[request_id] = transfer
        if self._segments is not None and offer.token is not None:
            self._segments.expect(peer, offer.token)
        if unasked or not self._same_host.needs_map(peer, offer.memory):
            self._wait(transfer)
            if transfer.share_bytes:  # else the KV is dropped, and the peer sends it again
                transfer.unasked = unasked
        else:
            assert offer.memory is not None
            mapping = asyncio.create_task(self._map_memory(transfer, offer.memory))
            self._mappings.add(mapping)
            mapping.add_done_callback(self._mappings.discard)

    async def _map_memory(self, transfer: IncomingTransfer, memory: str) -> None:
        """Try to map the peer's memory, then queue the transfer for its share of the budget."""
        if not transfer.is_dropped:  # as it is if the peer was lost meanwhile
            await self._same_host.try_map(transfer.peer, memory)
        if not transfer.is_dropped:
            self._wait(transfer)

    def _wait(self, transfer: IncomingTransfer) -> None:
        """Queue a transfer for its share of the budget, larger if its KV is in shared memory."""
        receiver, limit = transfer.receiver, self._config.max_kv_inflight_bytes
        if receiver.offers_memory:
            transfer.memory = self._same_host.memory_of(transfer.peer)
        if transfer.memory is not None:  # limited, so that a few transfers cannot use it all
            most_bytes, share = READ_CREDIT_BYTES[transfer.memory.kind]
            receiver.credit_bytes = max(receiver.credit_bytes, min(most_bytes, limit // share))
        self.budget.wait(transfer)

    def _check_limits(self, peer: bytes, num_tokens: int) -> None:
        """Raise WireError if a peer has too many offers, or too many tokens in several offers."""
        offers = [each.receiver for each in self._transfers.values() if each.peer == peer]
        if len(offers) >= MAX_OFFERS:
            raise WireError(ErrorCode.OVERLOADED, f"{MAX_OFFERS} offers of yours are here already")
        offered = sum(receiver.num_tokens for receiver in offers if not receiver.is_claimed)
        if offered and offered + num_tokens > MAX_OFFERED_TOKENS:
            raise WireError(ErrorCode.OVERLOADED, f"offers of {offered} tokens of yours are here")

    def _on_cancel(self, peer: bytes, request_id: int) -> None:
        transfer = self._transfers.get(request_id)
        if transfer is not None and transfer.peer == peer:
            error = TransferFailed(transfer.receiver.peer, "the prefill worker gave it up")
            self._end(transfer, error)

    def _on_lost(self, peer: bytes) -> None:
        for request_id, transfer in list(self._transfers.items()):
            if transfer.peer == peer and not transfer.receiver.is_complete:
                self.fail(request_id, PeerLost(transfer.receiver.peer))
        self._same_host.forget(peer)
        if self._segments is not None:
            self._segments.forget(peer)

    # From an offer to its last byte.

    def _reserve(self, transfer: IncomingTransfer) -> None:
        """Request blocks from the engine; `on_reserved` gets them."""
        receiver, peer = transfer.receiver, transfer.peer.decode()
        self._engine.post(
            lambda engine: engine.reserve(
                receiver.request_id,
                receiver.token_ids,
                peer,
                cache_salt=receiver.cache_salt,
                is_claimed=receiver.is_claimed,
            )
        )

    def _store_unasked(
        self, transfer: IncomingTransfer, unasked: list[tuple[Buffer, Buffer]]
    ) -> None:
        try:
            segments = transfer.receiver.accept_with(unasked, self._clock())
        except WireError as error:
            self.fail(transfer.receiver.request_id, error)
            return
        self._arrived += [(transfer, segment) for segment in segments]
        self._store_next()

    def _store_next(self) -> None:
        """Queue arrived segments for the transfer threads, up to `BATCH_BYTES` in one job."""
        # One job more than threads, so that no thread waits for the event loop.
        while self._arrived and len(self._stores) <= self._copies.num_at_once:
            batch: list[tuple[IncomingTransfer, Segment]] = []
            num_bytes = 0
            while self._arrived and num_bytes < BATCH_BYTES:
                batch.append(self._arrived.popleft())
                num_bytes += batch[-1][1].descriptor.num_bytes
            task = asyncio.create_task(self._store(batch))
            self._stores.add(task)
            task.add_done_callback(self._stores.discard)
            task.add_done_callback(lambda _: self._store_next())

    async def _store(self, batch: list[tuple[IncomingTransfer, Segment]]) -> None:
        num_bytes = sum(segment.descriptor.num_bytes for _, segment in batch)
        problems = await self._copies.run(store_all, self._cache, batch, num_bytes=num_bytes)
        acks: dict[IncomingTransfer, Ack | None] = {}  # the last one for each transfer
        for (transfer, segment), problem in zip(batch, problems, strict=True):
            if problem is not None:
                self._reject(transfer, segment, problem)
            else:
                acks[transfer] = transfer.receiver.stored(segment, self._clock())
        for transfer, ack in acks.items():
            self._acknowledge(transfer, ack)
        for transfer in dict.fromkeys(transfer for transfer, _ in batch):
            self._free_blocks(transfer)

    def _reject(self, transfer: IncomingTransfer, segment: Segment, problem: Exception) -> None:
        request_id, error = transfer.receiver.request_id, problem
        if not isinstance(error, WireError):
            log.error("a segment could not be unpacked", request=request_id, exc_info=problem)
            report_copy(problem, self._engine.post)
            error = WireError(ErrorCode.INTERNAL, "the KV could not be unpacked")
        transfer.receiver.broken(segment, error)
        self.fail(request_id, error)

    def _acknowledge(self, transfer: IncomingTransfer, ack: Ack | None) -> None:
        if ack is None:
            return
        frame, credit = ack
        transfer.acked_bytes = frame.kv_bytes
        self._send(transfer.peer, frame, credit.pack())
        if credit.ready and transfer.share_bytes:
            transfer.memory = None
            self.budget.end(transfer)
            self._on_complete(frame.request_id)

    def _end(self, transfer: IncomingTransfer, error: WireError) -> None:
        transfer.receiver.fail(error)
        self._drop(transfer)
        self._on_failed(transfer.receiver.request_id, error)

    def _drop(self, transfer: IncomingTransfer) -> None:
        """Remove a transfer, and free its blocks once no copy writes to them.

        The id must not be reused: a late block allocation from the engine could be mistaken for
        the reply to a new offer.
        """
        self._note_end(transfer.receiver.request_id)
        del self._transfers[transfer.receiver.request_id]
        transfer.is_dropped = True
        for arrival in list(transfer.arrivals):
            if arrival.acquire():  # now no thread will write it
                transfer.arrivals.discard(arrival)
                transfer.receiver.broken(arrival.segment, PeerLost(transfer.receiver.peer))
        self.budget.end(transfer)
        self._free_blocks(transfer)

    def _note_end(self, request_id: int) -> None:
        self._ended[request_id] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _free_blocks(self, transfer: IncomingTransfer) -> None:
        receiver = transfer.receiver
        if transfer.is_dropped and receiver.num_unpacking == 0:
            self._engine.post(lambda engine: engine.cancel(receiver.request_id))

    def _refuse(self, peer: bytes, request_id: int, error: WireError) -> None:
        detail = ErrorDetail(message=error.message, stage="transfer")
        self._send(peer, Error(request_id, error.code), encode_map(detail))

    def _send(self, peer: bytes, frame: Frame, payload: bytes) -> None:
        try:
            self._hub.send(peer, encode(frame, payload))
        except WireError as error:
            log.debug("frame dropped", tag=frame.tag.name, reason=error.message)
