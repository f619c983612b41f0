"""The decode role: takes a prompt's KV in, generates from it, sends the tokens to the router.

A request comes as two things, on two sockets, in any order: the KV (`worker.transfer.receiver`) and
the DECODE_REQUEST.  Generation begins when both are there.  The tokens of one engine step go out in
one message to each router.  SPEC 4.5, 4.6, 4.7.
"""

from __future__ import annotations

from collections.abc import Set

import structlog

from wire.errors import ErrorCode, RemoteProtocolError, TransferFailed, WireError
from wire.frames import AS_MANY_AS_FIT, DecodeDone, DecodeRequest, DecodeToken, Frame
from wire.options import Options
from wire.parts import MAX_HEADERS, Message
from wire.payloads import STOP, Logprobs, PeerDetail, Usage, decode_continuation, encode_map
from wire.process.log_limit import RepeatedLine
from wire.transfer import KVReceiver
from worker.engine.engine import Engine
from worker.engine.outputs import Displaced, Failed, Output, Reserved, Token
from worker.engine.sequence import overdue
from worker.environment import WorkerContext
from worker.link import RouterLink
from worker.metrics import TransferCounts
from worker.transfer.receiver import IncomingTransfers

log = structlog.get_logger("worker")


class Generation:
    """One DECODE_REQUEST, from its arrival to its end."""

    __slots__ = (
        "kv_deadline_s",
        "max_new_tokens",
        "num_tokens",
        "options",
        "receiver",
        "request_id",
        "requested_s",
        "router",
        "token_ids",
    )

    def __init__(
        self,
        router: RouterLink,
        frame: DecodeRequest,
        token_ids: tuple[int, ...],
        options: Options,
        requested_s: float,
        lease_s: float,
    ) -> None:
        self.router = router
        self.request_id = frame.request_id
        self.max_new_tokens = frame.max_new_tokens
        self.token_ids = token_ids
        self.options = options
        self.requested_s = requested_s
        self.kv_deadline_s = requested_s + lease_s
        self.receiver: KVReceiver | None = None  # once the KV is there
        self.num_tokens = 1  # the first, which PREFILL_DONE brought

    def begin(self, engine: Engine) -> None:
        engine.begin_decode(
            self.request_id, self.token_ids, self.options, self.max_new_tokens, self.requested_s
        )

    def check(self, receiver: KVReceiver) -> None:
        """Raise RemoteProtocolError unless the KV is that of all tokens but the last ones."""
        num_tokens = receiver.num_tokens
        is_short = len(self.token_ids) <= num_tokens
        if is_short or self.token_ids[:num_tokens] != receiver.token_ids:
            raise RemoteProtocolError("the KV offered is not that of the tokens asked for")

    def is_overdue(self, now: float) -> bool:
        """Whether its own deadline passed before the KV was here; after that the engine looks."""
        deadline_ms = self.options.deadline_ms
        is_over = deadline_ms is not None and now >= self.requested_s + deadline_ms / 1000
        return is_over and self.receiver is None

    def usage(self, token: Token) -> Usage:
        """What it cost until this last token."""
        receiver = self.receiver
        assert receiver is not None and token.finish_reason is not None
        is_stopped = token.finish_reason == STOP
        return Usage(
            finish_reason=token.finish_reason,
            completion_tokens=self.num_tokens,
            kv_bytes=receiver.kv_bytes,
            kv_skipped_tokens=receiver.cached_tokens,
            kv_seconds=receiver.kv_seconds,
            kv_transfer_seconds=receiver.transfer_s,
            stop_token_id=token.token_id if is_stopped else None,
            stop_logprobs=token.logprobs if is_stopped else None,
        )


class DecodeRole:
    """All requests of a decode worker, and the `incoming` KV for them.  On the event loop."""

    num_peers_up = 0  # prefill workers connect to it, it connects to none

    def __init__(self, context: WorkerContext) -> None:
        self._config = context.config
        self._engine = context.engine
        self._clock = context.clock
        self.transfers = TransferCounts()
        self._failed = RepeatedLine(log.warning, "request failed", self._clock)
        self._generations: dict[int, Generation] = {}
        self.incoming = IncomingTransfers(
            context, self._is_asked_for, self._begin_if_ready, self._on_transfer_failed
        )
        self.kv_endpoint = self.incoming.endpoint
        self.kv_unasked_bytes = context.config.kv_unasked_bytes
        self.segment_traffic = self.incoming.segment_traffic

    @property
    def request_ids(self) -> Set[int]:
        """Requests that a router has asked for, or whose KV comes or is here."""
        return self._generations.keys() | set(self.incoming)

    @property
    def num_unfinished(self) -> int:
        """Requests a drain waits for; KV that no router has asked about is not waited for."""
        return len(self._generations)

    @property
    def is_idle(self) -> bool:
        return not self._generations and not len(self.incoming)

    @property
    def kv_inflight_bytes(self) -> int:
        """Bytes that may arrive, or that are being unpacked."""
        return self.incoming.inflight_bytes

    # Frames of a router.

    def on_registered(self, router: RouterLink) -> None:
        # An offer does not say which router's request it is, so one lease serves for all routers:
        # those of one cluster have the same.
        self.incoming.lease_s = self._config.lease_s or router.lease_s
        lost = self.incoming.lost_epochs
        if lost.get(router.endpoint) == router.epoch & 0xFFFFFFFF:
            del lost[router.endpoint]

    def on_request(self, router: RouterLink, message: Message) -> None:
        frame = message.frame
        if not isinstance(frame, DecodeRequest):
            raise RemoteProtocolError("a decode worker takes DECODE_REQUEST only")
        if frame.max_new_tokens == AS_MANY_AS_FIT:
            raise RemoteProtocolError(f"max_new_tokens is {AS_MANY_AS_FIT}, which is for clients")
        if frame.request_id in self._generations:
            log.warning("request id used twice, frame dropped", request=frame.request_id)
            return
        token_ids, options = decode_continuation(message.body())
        self._generations[frame.request_id] = generation = Generation(
            router, frame, token_ids, options, self._clock(), self.incoming.lease_s
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
        generation = self._generations.pop(request_id, None)
        if generation is not None and generation.receiver is not None:
            self._engine.post(lambda engine: engine.cancel(request_id))

    def on_peers(self, router: RouterLink, peers: list[PeerDetail]) -> None:
        """Decode workers do not talk to each other."""

    def on_router_lost(self, router: RouterLink) -> None:
        for request_id, generation in list(self._generations.items()):
            if generation.router is router:
                self.on_cancel(request_id)
        # KV that it has not asked for yet would stay for a lease.  The upper half of a request id
        # is the epoch of its router (SPEC 1).  The epoch is kept: a prefill worker that has not
        # noticed the loss may offer more of its KV.
        epoch = router.epoch & 0xFFFFFFFF
        self.incoming.lost_epochs[router.endpoint] = epoch
        for request_id in self.incoming:
            if request_id >> 32 == epoch:
                self.incoming.cancel(request_id)

    # Outputs of the engine.

    def on_outputs(self, outputs: list[Output]) -> None:
        steps: dict[RouterLink, Step] = {}
        for output in outputs:
            match output:
                case Token():
                    generation = self._generations.get(output.request_id)
                    if generation is not None:  # else cancelled while the step was under way
                        step = steps.setdefault(generation.router, Step())
                        self._on_token(generation, output, step)
                case Reserved():
                    self.incoming.on_reserved(output)
                case Displaced():
                    if output.request_id not in self._generations:  # or a router asks for it now
                        self.incoming.fail(output.request_id, displaced())
                case Failed():
                    self._on_failed(output.request_id, output.for_peers())
        for router, step in steps.items():
            step.send(router)

    def tick(self, now: float) -> None:
        """End what has waited a lease for its other half, or past its own deadline."""
        self.incoming.tick(now)
        self._failed.tick()
        for request_id, generation in list(self._generations.items()):
            is_alone = generation.receiver is None and request_id not in self.incoming
            if generation.is_overdue(now):
                self.incoming.cancel(request_id)
                self._refuse(request_id, WireError(*overdue(generation.options)), "transfer")
            elif is_alone and now >= generation.kv_deadline_s:
                error = TransferFailed("the prefill worker", "its KV never came")
                self._on_transfer_failed(request_id, error)

    async def close(self) -> None:
        for request_id in list(self._generations):
            self.on_cancel(request_id)
        await self.incoming.close()

    def _is_asked_for(self, receiver: KVReceiver) -> bool:
        """Whether a router has asked for what is offered; raise WireError to refuse it."""
        generation = self._generations.get(receiver.request_id)
        if generation is None:
            return False
        generation.check(receiver)
        return True

    def _begin_if_ready(self, request_id: int) -> None:
        generation = self._generations.get(request_id)
        if generation is not None and self.incoming.is_complete(request_id):
            generation.receiver = receiver = self.incoming.take(request_id)
            self.transfers.end(
                "done", receiver.kv_bytes, receiver.skipped_bytes, receiver.kv_seconds
            )
            self._engine.post(generation.begin)

    def _on_token(self, generation: Generation, token: Token, step: Step) -> None:
        if token.finish_reason != STOP:  # a stop token is no part of the text
            generation.num_tokens += 1
            step.tokens.append(DecodeToken(generation.request_id, token.token_id))
            step.logprobs.append(token.logprobs)
        if token.finish_reason is not None:
            del self._generations[generation.request_id]
            step.ends.append((generation.request_id, generation.usage(token)))

    def _on_failed(self, request_id: int, error: WireError) -> None:
        if request_id in self.incoming:
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
    message = "it holds more than its peer's share, and others that are asked for wait"
    return WireError(ErrorCode.OVERLOADED, message)


class Step:
    """What one engine step has for one router."""

    __slots__ = ("ends", "logprobs", "tokens")

    def __init__(self) -> None:
        self.tokens: list[Frame] = []
        self.logprobs: list[Logprobs | None] = []
        self.ends: list[tuple[int, Usage]] = []

    def send(self, router: RouterLink) -> None:
        """The tokens in as few messages as hold them, then the ends: nothing follows an end."""
        for start in range(0, len(self.tokens), MAX_HEADERS):
            logprobs = self.logprobs[start : start + MAX_HEADERS]
            wanted = any(entry is not None for entry in logprobs)
            payload = (encode_map(logprobs),) if wanted else ()
            router.send(self.tokens[start : start + MAX_HEADERS], *payload)
        for request_id, usage in self.ends:
            router.send(DecodeDone(request_id), encode_map(usage))
