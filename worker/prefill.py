"""The prefill role: read a prompt, hand its KV to a decode worker, answer with the first token.

PREFILL_REQUEST puts a sequence into the engine.  When the engine has blocks for it, the KV is
offered to the decode worker; where a chunk takes long, only when the first is computed, so that no
blocks are held there meanwhile.  While chunks are computed, segments leave within the credit
(`worker.handover`); the first token goes to the router as soon as it is drawn, whether or not the
last segment has left.  The blocks are held until the hand-over has ended, however it ends.
SPEC 4.1, 4.2.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import Final

import structlog

from wire.errors import ErrorCode, RemoteProtocolError, TransferTooLarge, WireError
from wire.frames import ANY_RANK, NO_RANK, PrefillDone, PrefillRequest
from wire.parts import Message
from wire.payloads import PeerDetail, PrefillResult, decode_prompt, encode_prefill_result
from wire.transfer import KVSender
from worker.config import Config
from worker.executor.contract import KVCache, ModelInfo
from worker.handover import HandOver
from worker.link import RouterLink
from worker.metrics import HandOvers
from worker.outputs import Computed, Failed, Output, Started, Token
from worker.peers import DecodePeers
from worker.sequence import Sequence
from worker.surroundings import Computing, Copying, Plane

log = structlog.get_logger("worker")

# An offer before the first chunk saves the wait for a step of the decode worker's.  It is made if
# the last prompt's first chunk took less than so many leases: a tenth of what a decode worker waits
# for a segment (SPEC 6.6).  Above that, a second with a lease of 30, there is little to save.
EARLY_OFFER_LEASES: Final = 1 / 30


class Prefill:
    """One PREFILL_REQUEST, until its blocks are given back."""

    __slots__ = (
        "hand_over",
        "is_answered",
        "is_computing",
        "is_handed_over",
        "request_id",
        "router",
        "started",
        "started_s",
    )

    def __init__(self, router: RouterLink, request_id: int, hand_over: HandOver | None) -> None:
        self.router = router
        self.request_id = request_id
        self.hand_over = hand_over
        self.started: Started | None = None
        self.started_s = 0.0
        self.is_computing = False  # its first chunk is there
        # It is over when both are true, in either order: a decode worker that holds the whole
        # prompt already is ready before the first token is drawn.
        self.is_answered = False
        self.is_handed_over = False


class PrefillRole:
    """Everything a prefill worker has in hand.  Lives on the event loop."""

    kv_endpoint = ""

    def __init__(
        self,
        config: Config,
        info: ModelInfo,
        cache: KVCache,
        engine: Computing,
        copies: Copying,
        plane: Plane,
        identity: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._layout = info.layout
        self._cache = cache
        self._engine = engine
        self._copies = copies
        self._clock = clock
        self._peers = DecodePeers(identity, plane, clock)
        self.hand_overs = HandOvers()
        self._prefills: dict[int, Prefill] = {}
        self.first_chunk_s = inf  # how long the last one took
        self._hand_overs: set[asyncio.Task[None]] = set()  # until their buffers are back

    @property
    def num_unfinished(self) -> int:
        """Requests a drain waits for: also those whose KV is still being handed over."""
        return len(self._prefills)

    @property
    def is_idle(self) -> bool:
        return not self._prefills

    @property
    def kv_inflight_bytes(self) -> int:
        """Bytes sent and not yet acknowledged."""
        hand_overs = (prefill.hand_over for prefill in self._prefills.values())
        return sum(hand_over.inflight_bytes for hand_over in hand_overs if hand_over is not None)

    # Frames of a router.

    def on_registered(self, router: RouterLink) -> None:
        """What binds is read from `router` when it is needed."""

    def on_request(self, router: RouterLink, message: Message) -> None:
        frame = message.frame
        if not isinstance(frame, PrefillRequest):
            raise RemoteProtocolError("a prefill worker takes PREFILL_REQUEST only")
        if frame.request_id in self._prefills:
            log.warning("request id used twice, frame dropped", request=frame.request_id)
            return
        token_ids, options = decode_prompt(message.body(), frame.seq_len)
        hand_over = None
        if frame.decode_rank != NO_RANK:
            hand_over = self._offer_to(router, frame, token_ids)
        self._prefills[frame.request_id] = Prefill(router, frame.request_id, hand_over)
        # With a hand-over the whole limit is the options', and the engine stops after a token.
        limit = 1 if hand_over is None else None
        sequence = Sequence(
            frame.request_id, token_ids, options, limit, hand_over=hand_over is not None
        )
        self._engine.post(lambda engine: engine.add(sequence))

    def on_cancel(self, request_id: int) -> None:
        prefill = self._prefills.get(request_id)
        if prefill is not None:
            self._end(prefill)

    def on_peers(self, router: RouterLink, peers: list[PeerDetail]) -> None:
        self._peers.update(router.endpoint, peers)

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
        if prefill.hand_over is not None and self.first_chunk_s < EARLY_OFFER_LEASES * lease_s:
            self._offer(prefill.hand_over, started, now)

    def _on_computed(self, prefill: Prefill, computed: Computed, now: float) -> None:
        hand_over, started = prefill.hand_over, prefill.started
        assert hand_over is not None and started is not None
        if not prefill.is_computing:
            prefill.is_computing = True
            self.first_chunk_s = now - prefill.started_s
            if not hand_over.is_offered:
                self._offer(hand_over, started, now)
        hand_over.advance(computed.num_tokens, now)

    def _offer(self, hand_over: HandOver, started: Started, now: float) -> None:
        hand_over.offer(started.block_table, started.cached_tokens, now)
        task = asyncio.create_task(hand_over.run())
        self._hand_overs.add(task)
        task.add_done_callback(self._hand_overs.discard)

    def _on_first_token(self, prefill: Prefill, token: Token) -> None:
        assert prefill.started is not None
        hand_over, reason = prefill.hand_over, token.finish_reason
        kv_bytes = hand_over.sender.total_bytes if hand_over is not None and not reason else 0
        result = PrefillResult(
            token_id=token.token_id,
            cached_tokens=prefill.started.cached_tokens,
            finish_reason=reason,
            logprobs=token.logprobs,
            prompt_logprobs=token.prompt_logprobs,
        )
        prefill.router.send(
            PrefillDone(prefill.request_id, kv_bytes), encode_prefill_result(result)
        )
        prefill.is_answered = True
        if not kv_bytes:
            self._end(prefill)
        elif prefill.is_handed_over:
            del self._prefills[prefill.request_id]

    # Hand-overs.

    def tick(self, now: float) -> None:
        """Keep leases alive and end what has run out of one."""
        for prefill in list(self._prefills.values()):
            if prefill.hand_over is not None:
                prefill.hand_over.tick(now)
        self._peers.tick(now)

    async def close(self) -> None:
        for prefill in list(self._prefills.values()):
            self._end(prefill)
        await self._peers.close()
        await asyncio.gather(*self._hand_overs, return_exceptions=True)

    def _offer_to(
        self, router: RouterLink, frame: PrefillRequest, token_ids: tuple[int, ...]
    ) -> HandOver:
        peer = self._peers.find(router.endpoint, frame.decode_rank)
        if peer is None:
            rank = "any" if frame.decode_rank == ANY_RANK else frame.decode_rank
            raise WireError(ErrorCode.NO_WORKER, f"no decode worker of rank {rank} is known here")
        # The offer would be refused for it, but by then the blocks are taken.
        size, limit = len(token_ids) * self._layout.token_bytes, self._config.max_kv_transfer_bytes
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
                peer=peer.name,
            )

        return HandOver(
            make_sender, peer, self._cache, self._copies, self._on_hand_over_end, self._clock
        )

    def _on_hand_over_end(self, hand_over: HandOver) -> None:
        """The KV is there, or will never be."""
        self._enter(hand_over.sender)
        prefill = self._prefills.get(hand_over.request_id)
        if prefill is None or prefill.hand_over is not hand_over:
            return
        if hand_over.sender.error is not None:
            self._fail(prefill, hand_over.sender.error, "transfer")
            return
        prefill.is_handed_over = True
        self._engine.post(lambda engine: engine.release(prefill.request_id))
        if prefill.is_answered:
            del self._prefills[prefill.request_id]

    def _enter(self, sender: KVSender) -> None:
        accepted_at, now = sender.accepted_at, self._clock()
        self.hand_overs.end(
            sender.state.value,
            sender.kv_bytes,
            sender.skipped_tokens * self._layout.token_bytes,
            None if accepted_at is None else now - accepted_at,
        )

    def _fail(self, prefill: Prefill, error: WireError, stage: str) -> None:
        code = ErrorCode(error.code)
        log.warning("request failed", request=prefill.request_id, stage=stage, code=code.label)
        prefill.router.refuse(prefill.request_id, error, stage)
        self._end(prefill)

    def _end(self, prefill: Prefill) -> None:
        """Forget a request and free what it holds, here and at the decode worker."""
        del self._prefills[prefill.request_id]
        if prefill.hand_over is not None:
            prefill.hand_over.cancel()
        self._engine.post(lambda engine: engine.cancel(prefill.request_id))
