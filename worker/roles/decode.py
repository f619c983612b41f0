"""The role of decode and any workers: generates from KV that it receives, or computes itself.

The KV (`worker.transfer.receiver`) and the DECODE_REQUEST arrive on two sockets in any order;
generation starts when both are here.  The tokens of one engine step go out in one message to each
router.  SPEC 4.5, 4.6, 4.7.

A PREFILL_REQUEST with this worker's own rank is served here to its end (`worker.roles.local`).  One
with another rank goes to the prefill half (`worker.roles.prefill`): so prefill and decode are roles
of a request, and a worker that drains can send the KV of its sequences, which its prefix cache
has, to another worker.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import structlog
from msgspec import structs

from wire.errors import ErrorCode, RemoteProtocolError, TransferFailed, WireError
from wire.frames import AS_MANY_AS_FIT, DecodeRequest, PrefillRequest
from wire.options import Options
from wire.parts import Message
from wire.payloads import STOP, PeerDetail, Usage, decode_continuation
from wire.process.log import bind_trace
from wire.process.log_limit import RepeatedLine
from wire.transfer import KVReceiver
from worker.engine.engine import Engine
from worker.engine.outputs import Displaced, Failed, Output, Reserved, Started, Timed, Token
from worker.engine.sequence import overdue
from worker.environment import WorkerContext
from worker.link import RouterLink
from worker.roles.local import LocalRequest, LocalRequests
from worker.roles.prefill import PrefillRole
from worker.roles.results import Steps, Timing, usage_of
from worker.transfer.incoming import transfer_entries
from worker.transfer.receiver import NO_TRANSFER, IncomingTransfers

log = structlog.get_logger("worker")


@dataclass(slots=True, eq=False)
class Generation:
    """One DECODE_REQUEST, from its arrival to its end."""

    router: RouterLink
    frame: DecodeRequest
    token_ids: tuple[int, ...]
    options: Options
    lease_s: float
    timing: Timing
    receiver: KVReceiver | None = None  # once its KV is complete
    num_tokens: int = 1  # the first came in PREFILL_DONE

    def begin(self, engine: Engine) -> None:
        frame = self.frame
        limits = self.options, frame.max_new_tokens, self.timing.requested_s
        engine.begin_decode(frame.request_id, self.token_ids, *limits)

    def check(self, receiver: KVReceiver) -> None:
        """Raise RemoteProtocolError unless the KV has the request's first tokens and cache salt."""
        num_tokens = receiver.num_tokens
        is_short = len(self.token_ids) <= num_tokens
        if is_short or self.token_ids[:num_tokens] != receiver.token_ids:
            raise RemoteProtocolError("the KV offered is not that of the requested tokens")
        if self.options.cache_salt != receiver.cache_salt:
            raise RemoteProtocolError("the KV offered does not have the requested cache_salt")

    def is_overdue(self, now: float) -> bool:
        """Return whether the deadline passed before the KV came; later the engine checks it."""
        deadline_ms = self.options.deadline_ms
        is_over = deadline_ms is not None and now >= self.timing.requested_s + deadline_ms / 1000
        return is_over and self.receiver is None

    def usage(self, token: Token) -> Usage:
        receiver = self.receiver
        assert receiver is not None
        if self.options.timeline:
            self.timing.add(transfer_entries(receiver))
        return structs.replace(
            usage_of(token, self.num_tokens, self.timing),
            kv_bytes=receiver.kv_bytes,
            kv_skipped_tokens=receiver.cached_tokens,
            kv_seconds=receiver.kv_seconds,
            kv_transfer_seconds=receiver.transfer_s,
        )


class DecodeRole:
    """All requests of a worker, and their `incoming` KV.  Runs on the event loop.

    `local` are the requests that it serves alone; `prefill` has those that others generate for.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._config = context.config
        self._engine = context.engine
        self._clock = context.outside.clock
        self.prefill = PrefillRole(context)
        self.transfers = self.prefill.transfers  # of both directions
        self._failed = RepeatedLine(log.warning, "request failed", self._clock)
        self._generations: dict[int, Generation] = {}
        self._rank = context.identity.rank
        self.local = LocalRequests(self._engine.post, self._on_local_failed, self._clock)
        self.incoming = IncomingTransfers(
            context, self._is_requested, self._begin_if_ready, self._on_transfer_failed
        )
        self.kv_endpoint = self.incoming.endpoint
        self.kv_unasked_bytes = context.config.kv_unasked_bytes
        self.segment_traffic = context.segment_traffic

    @property
    def request_ids(self) -> Set[int]:
        own = self._generations.keys() | self.local.request_ids | self.prefill.request_ids
        return own | set(self.incoming)

    @property
    def num_unfinished(self) -> int:
        """The number of requests that a drain waits for; unclaimed KV does not count."""
        return len(self._generations) + len(self.local) + self.prefill.num_unfinished

    @property
    def is_idle(self) -> bool:
        return not self.num_unfinished and not len(self.incoming)

    @property
    def num_peers_up(self) -> int:
        return self.prefill.num_peers_up

    @property
    def kv_inflight_bytes(self) -> int:
        return self.incoming.inflight_bytes + self.prefill.kv_inflight_bytes

    # Frames of a router.

    def on_registered(self, router: RouterLink) -> None:
        # An offer does not name its router; all routers of a cluster have the same lease.
        self.incoming.lease_s = self._config.lease_s or router.lease_s
        lost = self.incoming.lost_epochs
        if lost.get(router.endpoint) == router.epoch & 0xFFFFFFFF:
            del lost[router.endpoint]

    def on_request(self, router: RouterLink, message: Message) -> None:
        frame = message.frame
        if not isinstance(frame, DecodeRequest | PrefillRequest):
            raise RemoteProtocolError(f"a router does not send {frame.tag.name}")
        if frame.request_id in self._generations or self._computes(frame.request_id):
            log.warning("request id used twice, frame dropped", request=frame.request_id)
        elif isinstance(frame, DecodeRequest):
            self._on_decode_request(router, frame, message)
        elif frame.decode_rank == self._rank:
            self.local.add(router, frame, message)
        else:
            self.prefill.on_request(router, message)

    def _on_decode_request(
        self, router: RouterLink, frame: DecodeRequest, message: Message
    ) -> None:
        if frame.max_new_tokens == AS_MANY_AS_FIT:
            raise RemoteProtocolError(f"max_new_tokens is {AS_MANY_AS_FIT}, which is for clients")
        token_ids, options = decode_continuation(message.body())
        bind_trace(frame.request_id, options.trace_id)
        timing, lease_s = Timing(self._clock), self.incoming.lease_s
        self._generations[frame.request_id] = generation = Generation(
            router, frame, token_ids, options, lease_s, timing
        )
        if (receiver := self.incoming.get(frame.request_id)) is not None:
            try:
                generation.check(receiver)
            except RemoteProtocolError as error:
                self.incoming.fail(frame.request_id, error)
                return
            self.incoming.claim(frame.request_id)
        elif self.incoming.has_ended(frame.request_id):
            gone = TransferFailed("the prefill worker", "its KV has gone")
            self._refuse(frame.request_id, gone, "transfer")  # its transfer was counted
        self._begin_if_ready(frame.request_id)

    def on_cancel(self, request_id: int) -> None:
        self.incoming.cancel(request_id)
        self.local.cancel(request_id)
        self.prefill.on_cancel(request_id)
        generation = self._generations.pop(request_id, None)
        if generation is not None and generation.receiver is not None:
            self._engine.post(lambda engine: engine.cancel(request_id))

    def on_peers(self, router: RouterLink, peers: list[PeerDetail]) -> None:
        self.prefill.on_peers(router, peers)

    def on_router_lost(self, router: RouterLink) -> None:
        for request_id, generation in list(self._generations.items()):
            if generation.router is router:
                self.on_cancel(request_id)
        self.local.on_router_lost(router)
        self.prefill.on_router_lost(router)
        # Free its unclaimed KV at once.  The upper half of a request id is the epoch of its router
        # (SPEC 1).  Remember the epoch: a prefill worker may still offer KV of it.
        epoch = router.epoch & 0xFFFFFFFF
        self.incoming.lost_epochs[router.endpoint] = epoch
        for request_id in self.incoming:
            if request_id >> 32 == epoch:
                self.incoming.cancel(request_id)

    # Outputs of the engine.

    def on_outputs(self, outputs: list[Output]) -> None:
        steps, for_others = Steps(), self.prefill.request_ids
        for output in outputs:
            if output.request_id in for_others:
                self.prefill.on_output(output)
                continue
            match output:
                case Token():
                    generation = self._generations.get(output.request_id)
                    if generation is not None:
                        self._on_token(generation, output, steps)
                    else:  # of a local request, or cancelled during the step
                        self.local.on_token(output, steps)
                case Timed():
                    generation = self._generations.get(output.request_id)
                    if generation is not None:
                        generation.timing.add(output.entries)
                    else:
                        self.local.on_timed(output)
                case Started():
                    self.local.on_started(output)
                case Reserved():
                    self.incoming.on_reserved(output)
                case Displaced():
                    if output.request_id not in self._generations:  # else claimed since
                        self.incoming.fail(output.request_id, displaced())
                case Failed():
                    self._on_failed(output.request_id, output.for_peers())
        steps.send()

    def tick(self, now: float) -> None:
        """End requests whose KV has not come within a lease or their own deadline."""
        self.incoming.tick(now)
        self.prefill.tick(now)
        self._failed.tick()
        for request_id, generation in list(self._generations.items()):
            is_alone = generation.receiver is None and request_id not in self.incoming
            if generation.is_overdue(now):
                self.incoming.cancel(request_id)
                self._refuse(request_id, WireError(*overdue(generation.options)), "transfer")
            elif is_alone and now >= generation.timing.requested_s + generation.lease_s:
                error = TransferFailed("the prefill worker", "its KV never came")
                self._on_transfer_failed(request_id, error)

    async def close(self) -> None:
        for request_id in [*self._generations, *self.local.request_ids]:
            self.on_cancel(request_id)
        await self.incoming.close()
        await self.prefill.close()

    def _computes(self, request_id: int) -> bool:
        """Return whether the engine computes or sends the KV of this request."""
        return request_id in self.local or request_id in self.prefill

    def _is_requested(self, receiver: KVReceiver) -> bool:
        """Return whether a router has requested this KV; raise WireError to refuse the offer."""
        if self._computes(receiver.request_id):  # a receiver of its KV knows the id
            raise WireError(ErrorCode.UNKNOWN_REQUEST, NO_TRANSFER)
        generation = self._generations.get(receiver.request_id)
        if generation is None:
            return False
        generation.check(receiver)
        return True

    def _begin_if_ready(self, request_id: int) -> None:
        generation = self._generations.get(request_id)
        receiver = self.incoming.get(request_id)
        if generation is not None and receiver is not None and receiver.is_complete:
            generation.receiver = self.incoming.take(request_id)
            sizes = receiver.kv_bytes, receiver.skipped_bytes
            self.transfers.end("done", *sizes, receiver.kv_seconds)
            self._engine.post(generation.begin)

    def _on_token(self, generation: Generation, token: Token, steps: Steps) -> None:
        if token.finish_reason != STOP:  # a stop token is not part of the text
            generation.num_tokens += 1
            steps.add_token(generation.router, token)
        if token.finish_reason is not None:
            del self._generations[token.request_id]
            steps.add_end(generation.router, token.request_id, generation.usage(token))

    def _on_local_failed(self, request: LocalRequest, error: WireError) -> None:
        stage = "decode" if request.num_tokens else "prefill"
        self._failed.add(
            {"stage": stage, "code": ErrorCode(error.code).label}, request=request.request_id
        )
        request.router.refuse(request.request_id, error, stage)

    def _on_failed(self, request_id: int, error: WireError) -> None:
        if request_id in self.local:
            self.local.fail(request_id, error)
        elif request_id in self.incoming:
            self.incoming.fail(request_id, error)
        else:
            self._refuse(request_id, error, "decode")

    def _on_transfer_failed(self, request_id: int, error: WireError) -> None:
        self.transfers.end("failed", 0, 0, None)
        self._refuse(request_id, error, "transfer")

    def _refuse(self, request_id: int, error: WireError, stage: str) -> None:
        generation = self._generations.pop(request_id, None)
        if generation is not None:
            code = ErrorCode(error.code)
            self._failed.add({"stage": stage, "code": code.label}, request=request_id)
            generation.router.refuse(request_id, error, stage)


def displaced() -> WireError:
    message = "it holds more than its peer's share, and claimed transfers wait"
    return WireError(ErrorCode.OVERLOADED, message)
