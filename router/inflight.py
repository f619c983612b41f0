"""The life of a request inside the router, from `submit` to its one end.

    WAITING -> PREFILL -> (HELD ->) DECODE
    any of them -> done | error | cancelled

The faces submit and cancel, the bus passes on what workers say, sinks hear of it.  Frames of an
attempt that is over are unknown: counted and dropped.  Pure: it sends through a callable and takes
its time from an injected clock; `tick` looks for what is overdue.  It tries once: a lost worker
ends its requests with WORKER_LOST.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import cast

import structlog

from router.fleet import Fleet, Worker
from router.flight import Attempt, Flight, Limits, Observer, Phase, RequestEnd, Send, new_tokens
from router.flights import Flights
from router.index import PrefixIndex
from router.placement import Placement
from router.request import Request, Sink
from wire.errors import ErrorCode, RemoteProtocolError, RequestFailed, WireError
from wire.frames import DecodeDone, DecodeRequest, DecodeToken, Error, PrefillDone
from wire.parts import Message
from wire.payloads import (
    ErrorDetail,
    Logprobs,
    PrefillResult,
    Usage,
    decode_map,
    decode_prefill_result,
    encode_continuation,
)

__all__ = ["InFlight", "Limits", "Observer", "RequestEnd", "Send"]

log = structlog.get_logger("router")


class InFlight:
    """Every request of this router.

    `dropped` counts frames by the reason they were dropped for, `rejected` refused submissions by
    the label of their code; `is_draining` refuses all new ones.  `router_epoch` (u32) fills the
    upper half of request ids.
    """

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        send: Send,
        *,
        limits: Limits,
        router_epoch: int,
        clock: Callable[[], float],
    ) -> None:
        self.is_draining = False
        self._limits = limits
        self._send = send
        self._clock = clock
        self._placement = Placement(fleet, index, limits=limits, router_epoch=router_epoch)
        self._flights = Flights(fleet, self._placement, send, limits=limits, clock=clock)
        self._handles = itertools.count(1)

        self.dropped: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        """Requests that are placed on workers."""
        return len(self._flights.attempts)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a worker with room."""
        return len(self._flights.waiting)

    @property
    def observers(self) -> list[Observer]:
        """Who hears of every end; append to it."""
        return self._flights.observers

    def submit(self, request: Request, sink: Sink) -> int:
        """Accept a request and return its handle; `sink` hears of it from now on.

        Raises:
            WireError: It was refused; no worker has seen it and `sink` hears nothing.
        """
        now = self._clock()
        deadline_ms = request.options.deadline_ms
        deadline = now + (self._limits.deadline_s if deadline_ms is None else deadline_ms / 1000)
        flight = Flight(
            handle=next(self._handles),
            request=request,
            sink=sink,
            new_tokens=new_tokens(request),
            is_decode_asked=request.max_new_tokens is not None,
            submitted_at=now,
            deadline=deadline,
            due=min(deadline, now + self._limits.queue_timeout_s),
        )
        try:
            if self.is_draining:
                raise WireError(ErrorCode.DRAINING, "the router is shutting down")
            self._flights.add(flight)
        except WireError as error:
            self.rejected[error.code.label] += 1
            raise
        return flight.handle

    def decode(self, handle: int, max_new_tokens: int) -> None:
        """The client of a request without `max_new_tokens` says how many it wants; once."""
        flight = self._flights.open.get(handle)
        if flight is None or flight.is_decode_asked:
            return
        flight.is_decode_asked = True
        if flight.new_tokens is None or max_new_tokens < flight.new_tokens:
            flight.new_tokens = max_new_tokens
        try:
            self._placement.check_length(flight)
        except WireError as error:
            self._flights.fail(flight, error)
        else:
            if flight.phase is Phase.HELD:
                self._continue(flight)
        self._flights.place_waiting()

    def cancel(self, handle: int, code: ErrorCode = ErrorCode.CANCELLED) -> None:
        """Drop a request; its sink hears nothing more.  Unknown handles are ignored."""
        flight = self._flights.open.get(handle)
        if flight is not None:
            self._flights.end(flight, code)
            self._flights.place_waiting()

    def cancel_all(self, code: ErrorCode, message: str) -> None:
        """End every request with this error: the time to drain is over."""
        for flight in list(self._flights.open.values()):
            self._flights.fail(flight, WireError(code, message))

    def tick(self) -> None:
        """End what is overdue; call it several times a second."""
        self._flights.fail_overdue()
        self._flights.place_waiting()

    def on_message(self, peer: bytes, message: Message) -> None:
        """Take a message of a registered worker.

        Raises:
            RemoteProtocolError: It is none that a worker sends.  What breaks the rules of a single
                request raises nothing and ends that request.
        """
        frame = message.frame
        if isinstance(frame, DecodeToken):
            self._on_tokens(peer, message)
            return
        if not isinstance(frame, PrefillDone | DecodeDone | Error):
            raise RemoteProtocolError(f"a worker does not send {frame.tag.name}")
        attempt = self._flights.attempts.get(frame.request_id)
        if attempt is None:
            self.dropped["unknown_request"] += 1
            return
        worker = _sender(attempt, peer, frame)
        if worker is None:
            self.dropped["wrong_worker"] += 1
            return
        try:
            self._on_answer(worker, attempt, frame, message)
        except RemoteProtocolError as error:
            log.warning("bad frame", worker=worker.name, reason=error.message)
            self._flights.fail(attempt.flight, error)
        self._flights.place_waiting()

    def on_lost(self, peer: bytes) -> None:
        """A worker is gone, or came back anew: end what was placed on it."""
        self._flights.fail_worker(peer)
        self._flights.place_waiting()

    def on_capacity(self) -> None:
        """A worker joined or freed blocks."""
        self._flights.place_waiting()

    def let_go(self, worker: Worker) -> None:
        """A worker drains: echo DRAIN as soon as nothing refers to it."""
        self._flights.let_go(worker)

    def _on_answer(
        self,
        worker: Worker,
        attempt: Attempt,
        frame: PrefillDone | DecodeDone | Error,
        message: Message,
    ) -> None:
        flight = attempt.flight
        if isinstance(frame, PrefillDone):
            if not attempt.is_reading:
                raise RemoteProtocolError("PREFILL_DONE came twice")
            self._on_first(flight, attempt, frame, decode_prefill_result(message.body()))
        elif isinstance(frame, DecodeDone):
            if flight.phase is not Phase.DECODE:
                raise RemoteProtocolError("DECODE_DONE before DECODE_REQUEST")
            usage = decode_map(Usage, message.body())
            self._flights.release_prefill(attempt)
            self._flights.release_decode(attempt)
            self._flights.finish(flight, usage)
        else:
            self._flights.fail(flight, _failure(frame, message), spare=worker)

    def _on_first(
        self, flight: Flight, attempt: Attempt, frame: PrefillDone, result: PrefillResult
    ) -> None:
        self._placement.finish_reading(attempt)
        flight.first, flight.first_at, flight.kv_bytes = result, self._clock(), frame.kv_bytes
        flight.phase = Phase.HELD
        flight.due = min(flight.deadline, flight.first_at + self._limits.hold_s)
        if result.finish_reason != "stop":
            flight.generated.append(result.token_id)
        try:
            flight.sink.on_prefill(result, frame.kv_bytes)
        except Exception:
            self._flights.drop_sink(flight)
        if flight.handle in self._flights.open:
            self._continue(flight)

    def _continue(self, flight: Flight) -> None:
        """After the first token: end, or ask for the rest, or wait for DECODE_REQUEST."""
        attempt, first = flight.attempt, flight.first
        assert attempt is not None and first is not None
        if first.finish_reason is not None or flight.new_tokens == 0:
            if attempt.decode is None:
                self._flights.release_prefill(attempt)  # It handed nothing over: it is done.
            reason = first.finish_reason or "length"
            self._flights.finish(flight, Usage(finish_reason=reason, kv_bytes=flight.kv_bytes))
        elif flight.is_decode_asked and flight.new_tokens and attempt.decode is not None:
            flight.phase, flight.due = Phase.DECODE, flight.deadline
            token_ids = (*flight.request.token_ids, *flight.generated)
            self._send(
                attempt.decode.identity,
                DecodeRequest(attempt.request_id, flight.new_tokens),
                encode_continuation(token_ids, flight.options),
            )

    def _on_tokens(self, peer: bytes, message: Message) -> None:
        frames = cast(tuple[DecodeToken, ...], message.frames)
        logprobs: list[Logprobs | None] | None = None
        if message.payload:
            logprobs = decode_map(list[Logprobs | None], message.body())
            if len(logprobs) != len(frames):
                raise RemoteProtocolError("DECODE_TOKEN: logprobs do not match the headers")
        attempts = self._flights.attempts
        for i, frame in enumerate(frames):
            attempt = attempts.get(frame.request_id)
            if attempt is None:
                self.dropped["unknown_request"] += 1
                continue
            decode, flight = attempt.decode, attempt.flight
            if decode is None or decode.identity != peer:
                self.dropped["wrong_worker"] += 1
                continue
            if flight.phase is not Phase.DECODE or len(flight.generated) > (flight.new_tokens or 0):
                self._flights.fail(flight, RemoteProtocolError("a token that was not asked for"))
                continue
            if attempt.prefill is not None:
                # A token proves that the KV is there: the hand-over has ended.
                self._flights.release_prefill(attempt)
            flight.generated.append(frame.token_id)
            try:
                flight.sink.on_token(frame.token_id, None if logprobs is None else logprobs[i])
            except Exception:
                self._flights.drop_sink(flight)


def _sender(
    attempt: Attempt, peer: bytes, frame: PrefillDone | DecodeDone | Error
) -> Worker | None:
    """Return the attempt's worker that `peer` is, if it is its place to send this frame."""
    prefill = None if isinstance(frame, DecodeDone) else attempt.prefill
    decode = None if isinstance(frame, PrefillDone) else attempt.decode
    for worker in (prefill, decode):
        if worker is not None and worker.identity == peer:
            return worker
    return None


def _failure(frame: Error, message: Message) -> RequestFailed:
    try:
        code = ErrorCode(frame.code)
    except ValueError:  # A later version's.  SPEC 5.6
        code = ErrorCode.INTERNAL
    detail = decode_map(ErrorDetail, message.body()) if message.payload else None
    return RequestFailed(code, detail.message if detail else f"the worker said {code.label}")
