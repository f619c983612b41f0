"""What workers say about requests, and where that takes each of them.

Frames of an attempt that is over, or from a worker that is not its, change nothing: counted and
dropped.  A frame out of turn is the worker's fault: the attempt fails, the request goes on with
another one if it may.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol, cast

import structlog

from router.core.checks import check_logprobs, check_read, check_token, checked_usage, failure
from router.core.placement import Placement
from router.core.state import Attempt, Limits, Phase, RequestState
from router.core.worker import Worker
from wire.errors import ErrorCode, RemoteProtocolError, WireError
from wire.frames import DecodeDone, DecodeToken, Error, PrefillDone
from wire.parts import Message
from wire.payloads import (
    Logprobs,
    PrefillResult,
    Usage,
    decode_map,
    decode_prefill_result,
)

log = structlog.get_logger("router")


class Requests(Protocol):
    """What of `router.core.dispatcher.Dispatcher` is used here."""

    def attempt(self, request_id: int) -> Attempt | None: ...
    def is_open(self, state: RequestState) -> bool: ...
    def go_on(self, state: RequestState) -> None: ...
    def finish(self, state: RequestState, usage: Usage) -> None: ...
    def finish_early(self, state: RequestState, reason: str) -> None: ...
    def drop_sink(self, state: RequestState) -> None: ...
    def release_prefill(self, attempt: Attempt) -> None: ...
    def release_decode(self, attempt: Attempt) -> None: ...
    def fail_attempt(
        self,
        attempt: Attempt,
        error: WireError,
        *,
        blamed: Worker | None = None,
        spare: Worker | None = None,
    ) -> None: ...


class Replies:
    """Takes frames of registered workers to their requests; `dropped` counts by the reason."""

    def __init__(
        self,
        requests: Requests,
        placement: Placement,
        *,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._requests = requests
        self._placement = placement
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
        attempt = self._requests.attempt(frame.request_id)
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

    def _on_answer(
        self,
        worker: Worker,
        attempt: Attempt,
        frame: PrefillDone | DecodeDone | Error,
        message: Message,
    ) -> None:
        state = attempt.state
        if isinstance(frame, PrefillDone):
            if not attempt.is_reading:
                raise RemoteProtocolError("PREFILL_DONE came twice")
            result = decode_prefill_result(message.body())
            check_read(worker, attempt, frame, result, self._vocab_size)
            self._on_read(state, attempt, frame, result)
        elif isinstance(frame, DecodeDone):
            if state.phase is not Phase.DECODE:
                raise RemoteProtocolError("DECODE_DONE before DECODE_REQUEST")
            usage = decode_map(Usage, message.body())
            usage = checked_usage(worker, attempt, usage, self._clock())
            self._requests.release_prefill(attempt)
            self._requests.release_decode(attempt)
            self._requests.finish(state, usage)
        else:
            error = failure(worker, frame, message)
            self._requests.fail_attempt(attempt, error, blamed=worker, spare=worker)

    def _on_read(
        self, state: RequestState, attempt: Attempt, frame: PrefillDone, result: PrefillResult
    ) -> None:
        """The prompt is read, and what follows it is drawn: for the client it is the first token,
        or one more after a failover."""
        self._placement.finish_reading(attempt)
        now = self._clock()
        is_first, state.kv_bytes = state.first is None, frame.kv_bytes
        state.phase, state.due = Phase.HELD, min(state.deadline, now + self._hold_s)
        if result.finish_reason != "stop":
            state.generated.append(result.token_id)
        try:
            if is_first:
                state.first, state.first_at = result, now
                state.sink.on_prefill(result, frame.kv_bytes)
            elif result.finish_reason != "stop":
                state.sink.on_token(result.token_id, result.logprobs)
        except Exception:
            self._requests.drop_sink(state)
        if not self._requests.is_open(state):
            return
        if result.finish_reason is not None or state.num_left == 0:
            self._requests.finish_early(state, result.finish_reason or "length")
        else:
            self._requests.go_on(state)

    def _on_tokens(self, peer: bytes, message: Message) -> None:
        frames = cast(tuple[DecodeToken, ...], message.frames)
        logprobs: list[Logprobs | None] | None = None
        if message.payload:
            logprobs = decode_map(list[Logprobs | None], message.body())
            if len(logprobs) != len(frames):
                raise RemoteProtocolError("DECODE_TOKEN: logprobs do not match the headers")
        find = self._requests.attempt
        for i, frame in enumerate(frames):
            attempt = find(frame.request_id)
            if attempt is None:
                self.dropped["unknown_request"] += 1
                continue
            decode, state = attempt.decode, attempt.state
            if decode is None or decode.identity != peer:
                self.dropped["wrong_worker"] += 1
                continue
            scores = None if logprobs is None else logprobs[i]
            try:
                self._check_token(state, frame, scores)
            except RemoteProtocolError as error:
                self._on_breach(attempt, decode, error)
                continue
            if attempt.prefill is not None:
                # A token proves that the KV is there: the transfer has ended.
                self._requests.release_prefill(attempt)
            state.generated.append(frame.token_id)
            try:
                state.sink.on_token(frame.token_id, scores)
            except Exception:
                self._requests.drop_sink(state)

    def _check_token(
        self, state: RequestState, frame: DecodeToken, scores: Logprobs | None
    ) -> None:
        if state.phase is not Phase.DECODE or len(state.generated) > (state.new_tokens or 0):
            raise RemoteProtocolError("a token that was not asked for")
        check_token(frame.token_id, self._vocab_size)
        if scores is not None:
            check_logprobs(scores, state.request.options.logprobs, self._vocab_size)

    def _on_breach(self, attempt: Attempt, worker: Worker, error: RemoteProtocolError) -> None:
        """The worker broke the rules of one request.  The client did nothing wrong.

        Nor does it hear what it was: some of that may be the worker's own words.
        """
        self.dropped["protocol"] += 1
        log.warning("bad frame", worker=worker.name, reason=error.message)
        message = f"{worker.name} broke the protocol"
        self._requests.fail_attempt(attempt, WireError(ErrorCode.INTERNAL, message), blamed=worker)


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
