"""What workers say about requests, and where that takes each of them.

Frames of an attempt that is over, or from a worker that is not its, change nothing: counted and
dropped.  A frame out of turn is the worker's fault: the attempt fails, the request goes on with
another one if it may.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

import structlog

from router.checks import check_logprobs, check_read, check_token, checked_usage, failure
from router.flight import Attempt, Flight, Limits, Phase, Send
from router.flights import Flights
from router.placement import Placement
from router.worker import Worker
from wire.errors import ErrorCode, RemoteProtocolError, WireError
from wire.frames import DecodeDone, DecodeRequest, DecodeToken, Error, PrefillDone
from wire.parts import Message
from wire.payloads import (
    Logprobs,
    PrefillResult,
    Usage,
    decode_map,
    decode_prefill_result,
    encode_continuation,
)

log = structlog.get_logger("router")


class Progress:
    """Takes frames of registered workers to their flights; `dropped` counts by the reason."""

    def __init__(
        self,
        flights: Flights,
        placement: Placement,
        send: Send,
        *,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._flights = flights
        self._placement = placement
        self._send = send
        self._hold_s = limits.hold_s
        self._vocab_size = limits.vocab_size
        self._clock = clock

    def on_message(self, peer: bytes, message: Message) -> None:
        """Take a message.

        Raises:
            RemoteProtocolError: It is none that a worker sends.
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
            self._on_breach(attempt, worker, error)

    def go_on(self, flight: Flight) -> None:
        """The first token is there, or the client asks for the rest: ask for it if both are so."""
        if flight.phase is not Phase.HELD or not flight.is_decode_asked:
            return
        attempt, num_left = flight.attempt, flight.num_left
        if num_left == 0:
            self._finish(flight, "length")
        elif attempt is None:  # It failed while the client made up its mind.
            self._flights.requeue(flight)
        elif num_left is not None and attempt.decode is not None:
            flight.phase, flight.due = Phase.DECODE, flight.deadline
            self._send(
                attempt.decode.identity,
                DecodeRequest(attempt.request_id, num_left),
                encode_continuation(flight.token_ids, attempt.options(self._clock())),
            )

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
            result = decode_prefill_result(message.body())
            check_read(worker, attempt, frame, result, self._vocab_size)
            self._on_read(flight, attempt, frame, result)
        elif isinstance(frame, DecodeDone):
            if flight.phase is not Phase.DECODE:
                raise RemoteProtocolError("DECODE_DONE before DECODE_REQUEST")
            usage = decode_map(Usage, message.body())
            usage = checked_usage(worker, attempt, usage, self._clock())
            self._flights.release_prefill(attempt)
            self._flights.release_decode(attempt)
            self._flights.finish(flight, usage)
        else:
            error = failure(worker, frame, message)
            self._flights.fail_attempt(attempt, error, blamed=worker, spare=worker)

    def _on_read(
        self, flight: Flight, attempt: Attempt, frame: PrefillDone, result: PrefillResult
    ) -> None:
        """The prompt is read, and what follows it is drawn: for the client it is the first token,
        or one more after a failover."""
        self._placement.finish_reading(attempt)
        now = self._clock()
        is_first, flight.kv_bytes = flight.first is None, frame.kv_bytes
        flight.phase, flight.due = Phase.HELD, min(flight.deadline, now + self._hold_s)
        if result.finish_reason != "stop":
            flight.generated.append(result.token_id)
        try:
            if is_first:
                flight.first, flight.first_at = result, now
                flight.sink.on_prefill(result, frame.kv_bytes)
            elif result.finish_reason != "stop":
                flight.sink.on_token(result.token_id, result.logprobs)
        except Exception:
            self._flights.drop_sink(flight)
        if flight.handle not in self._flights.open:
            return
        if result.finish_reason is not None or flight.num_left == 0:
            self._finish(flight, result.finish_reason or "length")
        else:
            self.go_on(flight)

    def _finish(self, flight: Flight, reason: str) -> None:
        """There is nothing to decode."""
        attempt = flight.attempt
        if attempt is not None and attempt.decode is None:
            self._flights.release_prefill(attempt)  # It handed nothing over: it is done.
        self._flights.finish(flight, Usage(finish_reason=reason, kv_bytes=flight.kv_bytes))

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
            scores = None if logprobs is None else logprobs[i]
            try:
                self._check_token(flight, frame, scores)
            except RemoteProtocolError as error:
                self._on_breach(attempt, decode, error)
                continue
            if attempt.prefill is not None:
                # A token proves that the KV is there: the hand-over has ended.
                self._flights.release_prefill(attempt)
            flight.generated.append(frame.token_id)
            try:
                flight.sink.on_token(frame.token_id, scores)
            except Exception:
                self._flights.drop_sink(flight)

    def _check_token(self, flight: Flight, frame: DecodeToken, scores: Logprobs | None) -> None:
        if flight.phase is not Phase.DECODE or len(flight.generated) > (flight.new_tokens or 0):
            raise RemoteProtocolError("a token that was not asked for")
        check_token(frame.token_id, self._vocab_size)
        if scores is not None:
            check_logprobs(scores, flight.request.options.logprobs, self._vocab_size)

    def _on_breach(self, attempt: Attempt, worker: Worker, error: RemoteProtocolError) -> None:
        """The worker broke the rules of one request.  The client did nothing wrong.

        Nor does it hear what it was: some of that may be the worker's own words.
        """
        self.dropped["protocol"] += 1
        log.warning("bad frame", worker=worker.name, reason=error.message)
        message = f"{worker.name} broke the protocol"
        self._flights.fail_attempt(attempt, WireError(ErrorCode.INTERNAL, message), blamed=worker)


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
