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

from router.core.checks import check_logprobs, check_read, check_token, checked_usage, failure
from router.core.placement import Placement
from router.core.state import Attempt, Limits, Phase, RequestState, Send
from router.core.table import RequestTable
from router.core.worker import Worker
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


class Replies:
    """Takes frames of registered workers to their requests; `dropped` counts by the reason."""

    def __init__(
        self,
        table: RequestTable,
        placement: Placement,
        send: Send,
        *,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._table = table
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
        attempt = self._table.attempts.get(frame.request_id)
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

    def go_on(self, state: RequestState) -> None:
        """The first token is there, or the client asks for the rest: ask for it if both are so."""
        if state.phase is not Phase.HELD or not state.is_decode_asked:
            return
        attempt, num_left = state.attempt, state.num_left
        if num_left == 0:
            self._finish(state, "length")
        elif attempt is None:  # It failed while the client made up its mind.
            self._table.requeue(state)
        elif num_left is not None and attempt.decode is not None:
            state.phase, state.due = Phase.DECODE, state.deadline
            self._send(
                attempt.decode.identity,
                DecodeRequest(attempt.request_id, num_left),
                encode_continuation(state.token_ids, attempt.options(self._clock())),
            )

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
            self._table.release_prefill(attempt)
            self._table.release_decode(attempt)
            self._table.finish(state, usage)
        else:
            error = failure(worker, frame, message)
            self._table.fail_attempt(attempt, error, blamed=worker, spare=worker)

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
            self._table.drop_sink(state)
        if state.handle not in self._table.open:
            return
        if result.finish_reason is not None or state.num_left == 0:
            self._finish(state, result.finish_reason or "length")
        else:
            self.go_on(state)

    def _finish(self, state: RequestState, reason: str) -> None:
        """There is nothing to decode."""
        attempt = state.attempt
        if attempt is not None and attempt.decode is None:
            self._table.release_prefill(attempt)  # It handed nothing over: it is done.
        self._table.finish(state, Usage(finish_reason=reason, kv_bytes=state.kv_bytes))

    def _on_tokens(self, peer: bytes, message: Message) -> None:
        frames = cast(tuple[DecodeToken, ...], message.frames)
        logprobs: list[Logprobs | None] | None = None
        if message.payload:
            logprobs = decode_map(list[Logprobs | None], message.body())
            if len(logprobs) != len(frames):
                raise RemoteProtocolError("DECODE_TOKEN: logprobs do not match the headers")
        attempts = self._table.attempts
        for i, frame in enumerate(frames):
            attempt = attempts.get(frame.request_id)
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
                self._table.release_prefill(attempt)
            state.generated.append(frame.token_id)
            try:
                state.sink.on_token(frame.token_id, scores)
            except Exception:
                self._table.drop_sink(state)

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
        self._table.fail_attempt(attempt, WireError(ErrorCode.INTERNAL, message), blamed=worker)


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
