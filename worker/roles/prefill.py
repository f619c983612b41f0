"""The prefill role: reads a prompt, sends its KV to a decode worker, answers with the first token.

PREFILL_REQUEST puts a sequence into the engine.  When the engine has blocks for it, the KV is
offered to the decode worker; where chunks take long, only after the first chunk is computed, so
that the decode worker holds no blocks meanwhile; and where they take next to no time too, so that a
small prompt's KV goes along with the offer.  While chunks are computed, segments are sent within
the credit (`worker.transfer.sender`).  The first token goes to the router as soon as it is drawn,
even if segments are still to be sent.  The blocks are held until the transfer has ended, however it
ends.  SPEC 4.1, 4.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from math import inf
from typing import Final

import structlog

from wire.errors import ErrorCode, RemoteProtocolError, TransferTooLarge, WireError
from wire.frames import ANY_RANK, NO_RANK, PrefillDone, PrefillRequest
from wire.parts import Message
from wire.payloads import STOP, PeerDetail, PrefillResult, decode_prompt, encode_prefill_result
from wire.process.log_limit import RepeatedLine
from wire.transfer import KVSender, new_key
from worker.compute.device_errors import report_copy
from worker.engine.engine import Engine
from worker.engine.outputs import Computed, Failed, Output, Started, Token
from worker.engine.sequence import Sequence
from worker.environment import WorkerContext
from worker.link import RouterLink
from worker.metrics import TransferCounts
from worker.transfer.peers import DecodePeers
from worker.transfer.same_host_peers import Lender
from worker.transfer.sender import OutgoingTransfer

log = structlog.get_logger("worker")

# KV is offered before its first chunk is computed if the last prompt's first chunk took less than
# so many leases: 1 s with a lease of 30 s (SPEC 6.6).  It saves waiting for a step of the decode
# worker: little beside a slower chunk, for which blocks would be held there in vain.
EARLY_OFFER_LEASES: Final = 1 / 30
# Measured: from an offer of KV to the ACK.  What is computed sooner need not be offered before.
ROUND_TRIP_S: Final = 0.002


class Prefill:
    """One PREFILL_REQUEST, until its blocks are given back."""

    __slots__ = (
        "is_answered",
        "is_computing",
        "is_ended",
        "is_transferred",
        "request_id",
        "router",
        "started",
        "started_s",
        "transfer",
    )

    def __init__(
        self, router: RouterLink, request_id: int, transfer: OutgoingTransfer | None
    ) -> None:
        self.router = router
        self.request_id = request_id
        self.transfer = transfer
        self.started: Started | None = None
        self.started_s = 0.0
        self.is_computing = False  # its first chunk is computed
        self.is_ended = False  # by `_end`, while its KV may be on its way
        # It is over when both are true.  Either may come first: a decode worker that holds the
        # whole prompt already is ready before the first token is drawn.
        self.is_answered = False
        self.is_transferred = False


class PrefillRole:
    """All requests of a prefill worker, until their blocks are given back.  On the event loop.

    `peers` are the decode workers it hands KV to.
    """

    kv_endpoint, kv_unasked_bytes = "", 0

    def __init__(self, context: WorkerContext) -> None:
        self._config = context.config
        self._cache = context.cache
        self._layout = context.cache.layout
        self._engine = context.engine
        self._copies = context.copies
        self._clock = context.clock
        self._failed = RepeatedLine(log.warning, "request failed", self._clock)
        is_on = context.config.kv_shared_memory == "auto"
        name, make_port = context.identity.name, context.make_port
        self._lender = Lender(context.cache, name, make_port, is_on=is_on)
        self.peers = DecodePeers(
            context.identity.name,
            context.plane,
            context.clock,
            has_segments=context.config.kv_segment_port != "off",
        )
        self._is_encrypted = context.plane.is_encrypted
        self.segment_traffic = self.peers.segment_traffic
        self.transfers = TransferCounts()
        self._prefills: dict[int, Prefill] = {}
        self.first_chunk_s = inf  # of the last prompt
        # By request id, until the socket has let go of the blocks.
        self._sending: dict[int, asyncio.Task[None]] = {}

    @property
    def request_ids(self) -> Set[int]:
        """Requests whose prompts are read, or whose blocks are still needed for the transfer."""
        return self._prefills.keys()

    @property
    def num_unfinished(self) -> int:
        """Requests a drain waits for, those included whose KV is still being sent."""
        return len(self._prefills)

    @property
    def is_idle(self) -> bool:
        return not self._prefills

    @property
    def num_peers_up(self) -> int:
        """Decode workers that a connection is up to."""
        return self.peers.num_up

    @property
    def kv_inflight_bytes(self) -> int:
        """Bytes sent and not yet acknowledged."""
        transfers = (prefill.transfer for prefill in self._prefills.values())
        return sum(transfer.inflight_bytes for transfer in transfers if transfer is not None)

    # Frames of a router.

    def on_registered(self, router: RouterLink) -> None:
        """Nothing to do: each request reads the lease from its router."""

    def on_request(self, router: RouterLink, message: Message) -> None:
        frame = message.frame
        if not isinstance(frame, PrefillRequest):
            raise RemoteProtocolError("a prefill worker takes PREFILL_REQUEST only")
        if frame.request_id in self._prefills or frame.request_id in self._sending:
            log.warning("request id used twice, frame dropped", request=frame.request_id)
            return
        token_ids, options = decode_prompt(message.body(), frame.seq_len)
        transfer = None
        if frame.decode_rank != NO_RANK:
            transfer = self._offer_to(router, frame, token_ids)
        self._prefills[frame.request_id] = Prefill(router, frame.request_id, transfer)
        # With a transfer, the options' limit is that of the whole answer, which the engine needs to
        # know; it stops after one token.
        limit = 1 if transfer is None else None
        sequence = Sequence(
            frame.request_id, token_ids, options, limit, transfer=transfer is not None
        )
        self._engine.post(lambda engine: engine.add(sequence))

    def on_cancel(self, request_id: int) -> None:
        prefill = self._prefills.get(request_id)
        if prefill is not None:
            self._end(prefill)

    def on_peers(self, router: RouterLink, peers: list[PeerDetail]) -> None:
        self.peers.update(router.endpoint, peers)

    def on_router_lost(self, router: RouterLink) -> None:
        for prefill in list(self._prefills.values()):
            if prefill.router is router:
                self._end(prefill)

    # Outputs of the engine.

    def on_outputs(self, outputs: list[Output]) -> None:
        now = self._clock()
        for output in outputs:
            prefill = self._prefills.get(output.request_id)
            if prefill is None:
                continue  # cancelled while the step was under way
            match output:
                case Started():
                    self._on_started(prefill, output, now)
                case Computed():
                    self._on_computed(prefill, output, now)
                case Token():
                    self._on_first_token(prefill, output)
                case Failed():
                    self._fail(prefill, output.for_peers(), "prefill")

    def _on_started(self, prefill: Prefill, started: Started, now: float) -> None:
        prefill.started, prefill.started_s = started, now
        lease_s = self._config.lease_s or prefill.router.lease_s
        if prefill.transfer is not None and self.first_chunk_s < EARLY_OFFER_LEASES * lease_s:
            if self.first_chunk_s < ROUND_TRIP_S and prefill.transfer.is_taken_unasked:
                return  # when it is computed, all of it goes with the offer
            self._offer(prefill, started.cached_tokens, now)

    def _on_computed(self, prefill: Prefill, computed: Computed, now: float) -> None:
        transfer = prefill.transfer
        assert transfer is not None
        if not prefill.is_computing:
            prefill.is_computing = True
            self.first_chunk_s = now - prefill.started_s
            if not transfer.is_offered:
                self._offer(prefill, computed.num_tokens, now)
                return
        transfer.advance(computed.num_tokens, now)

    def _offer(self, prefill: Prefill, num_tokens: int, now: float) -> None:
        """Offer the KV, of which so many tokens are computed."""
        assert prefill.transfer is not None and prefill.started is not None
        prefill.transfer.offer(prefill.started.block_table, num_tokens, now)
        task = asyncio.create_task(self._send(prefill, prefill.transfer))
        self._sending[prefill.request_id] = task
        task.add_done_callback(lambda _: self._sending.pop(prefill.request_id))

    async def _send(self, prefill: Prefill, transfer: OutgoingTransfer) -> None:
        """Send the KV; give the blocks back when the transfer and the socket are done with them."""
        await transfer.run()
        give_back = Engine.cancel if prefill.is_ended else Engine.release
        self._engine.post(lambda engine: give_back(engine, prefill.request_id))

    def _on_first_token(self, prefill: Prefill, token: Token) -> None:
        assert prefill.started is not None
        transfer, reason = prefill.transfer, token.finish_reason
        kv_bytes = transfer.sender.total_bytes if transfer is not None and not reason else 0
        result = PrefillResult(
            token_id=token.token_id,
            cached_tokens=prefill.started.cached_tokens,
            finish_reason=reason,
            logprobs=token.logprobs,
            prompt_logprobs=token.prompt_logprobs,
            stop_token_id=token.token_id if reason == STOP else None,
        )
        prefill.router.send(
            PrefillDone(prefill.request_id, kv_bytes), encode_prefill_result(result)
        )
        prefill.is_answered = True
        if not kv_bytes:
            self._end(prefill)
        elif prefill.is_transferred:
            del self._prefills[prefill.request_id]

    # Transfers.

    def tick(self, now: float) -> None:
        """Keep leases alive and end what has run out of one."""
        for prefill in list(self._prefills.values()):
            if prefill.transfer is not None:
                prefill.transfer.tick(now)
        self.peers.tick(now)
        self._failed.tick()

    async def close(self) -> None:
        for prefill in list(self._prefills.values()):
            self._end(prefill)
        self._lender.close()
        await self.peers.close()
        await asyncio.gather(*self._sending.values(), return_exceptions=True)

    def _offer_to(
        self, router: RouterLink, frame: PrefillRequest, token_ids: tuple[int, ...]
    ) -> OutgoingTransfer:
        peer = self.peers.find(router.endpoint, frame.decode_rank)
        if peer is None:
            rank = "any" if frame.decode_rank == ANY_RANK else frame.decode_rank
            raise WireError(ErrorCode.NO_WORKER, f"no decode worker of rank {rank} is known here")
        # The decode worker would refuse the offer, but only after blocks were taken here.
        size, limit = (
            self._layout.transfer_bytes(len(token_ids)),
            self._config.max_kv_transfer_bytes,
        )
        if size > limit:
            raise TransferTooLarge(size, limit)

        def make_sender(now: float) -> KVSender:
            return KVSender(
                frame.request_id,
                self._layout,
                token_ids,
                max_bytes=limit,
                lease_s=self._config.lease_s or router.lease_s,
                now=now,
                segment_bytes=self._config.segment_bytes,
                block_size=self._cache.block_size,
                num_shards=self._cache.num_shards,
                stages=self._cache.stages,
                memory=self._lender.offered,
                key=new_key() if peer.segments and self._is_encrypted else None,
                token=peer.segments.token if peer.segments else None,
                peer=peer.name,
            )

        return OutgoingTransfer(
            make_sender, peer, self._cache, self._copies, self._on_transfer_end, self._clock
        )

    def _on_transfer_end(self, transfer: OutgoingTransfer) -> None:
        """The decode worker has all KV, or will never have it."""
        self._count(transfer.sender)
        if transfer.problem is not None:
            report_copy(transfer.problem, self._engine.post)
        prefill = self._prefills.get(transfer.request_id)
        if prefill is None or prefill.transfer is not transfer:
            return
        if transfer.sender.error is not None:
            self._fail(prefill, transfer.sender.error, "transfer")
            return
        prefill.is_transferred = True
        if prefill.is_answered:
            del self._prefills[prefill.request_id]

    def _count(self, sender: KVSender) -> None:
        accepted_at, now = sender.accepted_at, self._clock()
        self.transfers.end(
            sender.state.value,
            sender.kv_bytes,
            sender.skipped_bytes,
            None if accepted_at is None else now - accepted_at,
        )

    def _fail(self, prefill: Prefill, error: WireError, stage: str) -> None:
        code = ErrorCode(error.code)
        self._failed.add({"stage": stage, "code": code.label}, request=prefill.request_id)
        prefill.router.refuse(prefill.request_id, error, stage)
        self._end(prefill)

    def _end(self, prefill: Prefill) -> None:
        """Forget a request and free what it holds, here and at the decode worker."""
        del self._prefills[prefill.request_id]
        prefill.is_ended = True
        if prefill.transfer is not None:
            prefill.transfer.cancel()
        end = Engine.halt if prefill.request_id in self._sending else Engine.cancel
        self._engine.post(lambda engine: end(engine, prefill.request_id))
