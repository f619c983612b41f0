"""The prefill role: prefills prompts, sends KV to other workers and first tokens to routers.

PREFILL_REQUEST adds a sequence to the engine.  The KV is offered to the decode worker as soon as
the engine has allocated blocks.  In two cases the offer waits for the first chunk: if chunks are
slow, so that the decode worker does not allocate blocks too early, and if they are so fast that the
offer itself can carry the KV.  While chunks are computed, segments are sent within the credit
(`worker.transfer.sender`).  The first token is sent as soon as it is sampled.  The blocks are kept
until the transfer has ended.  SPEC 4.1, 4.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import dataclass
from math import inf
from typing import Final

import structlog

from wire.errors import ErrorCode, RemoteProtocolError, TransferTooLarge, WireError
from wire.frames import ANY_RANK, NO_RANK, PrefillRequest, Role
from wire.options import Options
from wire.parts import Message
from wire.payloads import PeerDetail, decode_prompt
from wire.process.log import bind_trace
from wire.process.log_limit import RepeatedLine
from wire.transfer import KVSender, new_key
from worker.compute.device_errors import report_copy
from worker.engine.engine import Engine
from worker.engine.outputs import Computed, Failed, Output, Started, Timed, Token
from worker.engine.sequence import Sequence
from worker.environment import WorkerContext
from worker.link import RouterLink
from worker.metrics import TransferCounts
from worker.roles.results import Timing, send_first
from worker.transfer.peers import DecodePeers
from worker.transfer.same_host_peers import lend
from worker.transfer.sender import OutgoingTransfer

log = structlog.get_logger("worker")

# KV is offered before its first chunk is computed if the last prompt's first chunk took less than
# this fraction of a lease: 1 s with a lease of 30 s (SPEC 6.6).  An early offer saves the wait for
# a step of the decode worker, which is short compared to a slower chunk.
EARLY_OFFER_LEASES: Final = 1 / 30
# The measured time from an offer of KV to its ACK.  If chunks are faster, the offer waits for one.
ROUND_TRIP_S: Final = 0.002


@dataclass(slots=True, eq=False)
class Prefill:
    """The state of one PREFILL_REQUEST, until the request is over."""

    router: RouterLink
    request_id: int
    transfer: OutgoingTransfer | None
    timing: Timing
    started: Started | None = None
    started_s: float = 0.0
    is_computed: bool = False  # its first chunk is computed
    is_ended: bool = False  # `_end` was called; a task may still send its KV
    # The request is over when both are true.  They may become true in either order, because a
    # decode worker that has the whole prompt cached completes the transfer before the first token.
    is_response_sent: bool = False
    is_transferred: bool = False


class PrefillRole:
    """Handles prompts whose answers other workers generate, on the event loop.

    `peers` are the workers that it sends KV to.  `worker.roles.decode.DecodeRole` has one of these.
    """

    kv_endpoint, kv_unasked_bytes = "", 0

    def __init__(self, context: WorkerContext) -> None:
        self._config = context.config
        self._cache = context.cache
        self._layout = context.cache.layout
        self._engine = context.engine
        self._copies = context.copies
        self._clock = context.outside.clock
        self._failed = RepeatedLine(log.warning, "request failed", self._clock)
        is_on = context.config.kv_shared_memory == "auto"
        name, make_port = context.identity.name, context.outside.make_port
        self._memory = lend(context.cache, name, make_port, is_on=is_on)
        has_no_segments = context.config.kv_segment_port == "off"
        self.peers = DecodePeers(
            context.identity.name,
            context.plane,
            context.outside.clock,
            segment_traffic=None if has_no_segments else context.segment_traffic,
            connects_early=context.identity.role is Role.PREFILL,
        )
        self._is_encrypted = context.plane.is_encrypted
        self.segment_traffic = context.segment_traffic
        self.transfers = TransferCounts()
        self._prefills: dict[int, Prefill] = {}
        self.first_chunk_s = inf  # how long the first chunk of the last prompt took
        # Send tasks by request id, until the socket no longer reads the blocks.
        self._sending: dict[int, asyncio.Task[None]] = {}

    def __contains__(self, request_id: int) -> bool:
        """Return whether a request is unfinished, or its KV is still being sent."""
        return request_id in self._prefills or request_id in self._sending

    @property
    def request_ids(self) -> Set[int]:
        return self._prefills.keys()

    @property
    def num_unfinished(self) -> int:
        """The number of requests that must end before a draining worker exits."""
        return len(self._prefills)

    @property
    def is_idle(self) -> bool:
        return not self._prefills

    @property
    def num_peers_up(self) -> int:
        return self.peers.num_up

    @property
    def kv_inflight_bytes(self) -> int:
        """The number of bytes of KV that were sent but not acknowledged."""
        transfers = (prefill.transfer for prefill in self._prefills.values())
        return sum(transfer.inflight_bytes for transfer in transfers if transfer is not None)

    # Frames from routers.

    def on_registered(self, router: RouterLink) -> None:
        """Do nothing: each request gets the lease from its router."""

    def on_request(self, router: RouterLink, message: Message) -> None:
        frame = message.frame
        if not isinstance(frame, PrefillRequest):
            raise RemoteProtocolError("a prefill worker takes PREFILL_REQUEST only")
        if frame.request_id in self:
            log.warning("request id used twice, frame dropped", request=frame.request_id)
            return
        token_ids, options = decode_prompt(message.body(), frame.seq_len)
        bind_trace(frame.request_id, options.trace_id)
        transfer = None
        if frame.decode_rank != NO_RANK:
            transfer = self._offer_to(router, frame, token_ids, options)
        timing = Timing(self._clock)
        self._prefills[frame.request_id] = Prefill(router, frame.request_id, transfer, timing)
        # With a transfer, the engine stops after one token regardless of the request's limit.
        is_sent = transfer is not None
        limit = None if is_sent else 1
        sequence = Sequence(frame.request_id, token_ids, options, limit, transfer=is_sent)
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

    # Outputs from the engine.

    def on_outputs(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.on_output(output)

    def on_output(self, output: Output) -> None:
        """Handle one output; ignore those of requests that were cancelled during the step."""
        prefill = self._prefills.get(output.request_id)
        if prefill is None:
            return
        match output:
            case Started():
                self._on_started(prefill, output, self._clock())
            case Computed():
                self._on_computed(prefill, output, self._clock())
            case Timed():
                prefill.timing.add(output.entries)
            case Token():
                self._on_first_token(prefill, output)
            case Failed():
                self._fail(prefill, output.for_peers(), "prefill")

    def _on_started(self, prefill: Prefill, started: Started, now: float) -> None:
        prefill.started, prefill.started_s = started, now
        lease_s = self._config.lease_s or prefill.router.lease_s
        if prefill.transfer is not None and self.first_chunk_s < EARLY_OFFER_LEASES * lease_s:
            if self.first_chunk_s < ROUND_TRIP_S and prefill.transfer.is_taken_unasked:
                return  # the offer will carry the KV of the first chunk
            self._offer(prefill, started.cached_tokens, now)

    def _on_computed(self, prefill: Prefill, computed: Computed, now: float) -> None:
        transfer = prefill.transfer
        assert transfer is not None
        if not prefill.is_computed:
            prefill.is_computed = True
            self.first_chunk_s = now - prefill.started_s
            if not transfer.is_offered:
                self._offer(prefill, computed.num_tokens, now)
                return
        transfer.advance(computed.num_tokens, now)

    def _offer(self, prefill: Prefill, num_tokens: int, now: float) -> None:
        """Offer the KV of a prompt whose first `num_tokens` tokens are computed."""
        assert prefill.transfer is not None and prefill.started is not None
        prefill.transfer.offer(prefill.started.block_table, num_tokens, now)
        task = asyncio.create_task(self._send(prefill, prefill.transfer))
        self._sending[prefill.request_id] = task
        task.add_done_callback(lambda _: self._sending.pop(prefill.request_id))

    async def _send(self, prefill: Prefill, transfer: OutgoingTransfer) -> None:
        """Send the KV, then free the blocks, which the socket no longer reads."""
        await transfer.run()
        free_blocks = Engine.cancel if prefill.is_ended else Engine.release
        self._engine.post(lambda engine: free_blocks(engine, prefill.request_id))

    def _on_first_token(self, prefill: Prefill, token: Token) -> None:
        assert prefill.started is not None
        transfer, is_over = prefill.transfer, token.finish_reason is not None
        kv_bytes = 0 if transfer is None or is_over else transfer.sender.total_bytes
        send_first(prefill.router, token, prefill.started.cached_tokens, kv_bytes, prefill.timing)
        prefill.is_response_sent = True
        if not kv_bytes:
            self._end(prefill)
        elif prefill.is_transferred:
            del self._prefills[prefill.request_id]

    # Transfers.

    def tick(self, now: float) -> None:
        """Renew leases and end expired transfers."""
        for prefill in list(self._prefills.values()):
            if prefill.transfer is not None:
                prefill.transfer.tick(now)
        self.peers.tick(now)
        self._failed.tick()

    async def close(self) -> None:
        for prefill in list(self._prefills.values()):
            self._end(prefill)
        if self._memory is not None:
            self._memory.close()
        await self.peers.close()
        await asyncio.gather(*self._sending.values(), return_exceptions=True)

    def _offer_to(
        self,
        router: RouterLink,
        frame: PrefillRequest,
        token_ids: tuple[int, ...],
        options: Options,
    ) -> OutgoingTransfer:
        peer = self.peers.find(router.endpoint, frame.decode_rank)
        if peer is None:
            rank = "unassigned" if frame.decode_rank == ANY_RANK else frame.decode_rank
            raise WireError(ErrorCode.NO_WORKER, f"no worker of rank {rank} takes KV from here")
        # The decode worker would reject the offer too, but only after blocks were allocated here.
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
                memory=None if self._memory is None else self._memory.name,
                key=new_key() if peer.segments and self._is_encrypted else None,
                token=peer.segments.token if peer.segments else None,
                cache_salt=options.cache_salt,
                peer=peer.name,
            )

        return OutgoingTransfer(
            make_sender, peer, self._cache, self._copies, self._on_transfer_end, self._clock
        )

    def _on_transfer_end(self, transfer: OutgoingTransfer) -> None:
        """Record the end of a transfer, and fail the request if it failed."""
        sender = transfer.sender
        accepted_at = sender.accepted_at
        seconds = None if accepted_at is None else self._clock() - accepted_at
        self.transfers.end(sender.state.value, sender.kv_bytes, sender.skipped_bytes, seconds)
        if transfer.problem is not None:
            report_copy(transfer.problem, self._engine.post)
        prefill = self._prefills.get(transfer.request_id)
        if prefill is None or prefill.transfer is not transfer:
            return
        if sender.error is not None:
            self._fail(prefill, sender.error, "transfer")
            return
        prefill.is_transferred = True
        if prefill.is_response_sent:
            del self._prefills[prefill.request_id]

    def _fail(self, prefill: Prefill, error: WireError, stage: str) -> None:
        code = ErrorCode(error.code)
        self._failed.add({"stage": stage, "code": code.label}, request=prefill.request_id)
        prefill.router.refuse(prefill.request_id, error, stage)
        self._end(prefill)

    def _end(self, prefill: Prefill) -> None:
        """End a request and free its blocks on this worker and on the decode worker."""
        del self._prefills[prefill.request_id]
        prefill.is_ended = True
        if prefill.transfer is not None:
            prefill.transfer.cancel()
        end = Engine.halt if prefill.request_id in self._sending else Engine.cancel
        self._engine.post(lambda engine: end(engine, prefill.request_id))
