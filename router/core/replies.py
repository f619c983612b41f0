"""Validates frames from workers and applies them to requests.

A frame for an attempt that has ended, or from a worker that does not serve the attempt, is counted
and dropped.  A frame out of order or with impossible values fails the attempt.  `wire.payloads`
checks what does not depend on the request; the checks here need the vocabulary, the length of the
prompt, the requested logprobs or the elapsed time.  Clients never receive a worker's own error
text, but a fixed sentence for each code (`SENTENCES`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog
from msgspec import structs

from router.core.failover import AGAIN
from router.core.fleet import Worker
from router.core.placement import Placement
from router.core.state import Attempt, Limits, Phase, RequestState
from wire.errors import ErrorCode, RemoteProtocolError, RequestFailed, WireError
from wire.frames import DecodeDone, Error, PrefillDone
from wire.logprobs import largest_top_token_id, num_rows
from wire.parts import Message
from wire.payloads import (
    STOP,
    Logprobs,
    PrefillResult,
    Usage,
    decode_error,
    decode_map,
    decode_prefill_result,
    decode_usage,
)
from wire.process.log_limit import RepeatedLine

log = structlog.get_logger("router")

# The error codes that a worker may send for a request, and the text for the client.  SPEC 5.6.
SENTENCES: Final = {
    ErrorCode.INTERNAL: "the worker failed",
    ErrorCode.PROTOCOL: "the worker does not understand the router; run the same release on both",
    ErrorCode.INVALID_REQUEST: "the worker refused the request: an option or a token id is out of "
    "range for this model, or what limits the answer (its structure, allowed_token_ids, "
    "bad_words, logit_bias) is malformed, or leaves none within its limits",
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: "the prompt fills the model's context; shorten it",
    ErrorCode.KV_TRANSFER_TOO_LARGE: "the KV cache of this prompt is over max_kv_transfer_bytes of "
    "a worker; shorten the prompt or raise the limit on the workers",
    ErrorCode.OVERLOADED: "the worker has no room",
    ErrorCode.NO_WORKER: "the prefill worker does not know the decode worker",
    ErrorCode.DRAINING: "the worker is leaving",
    ErrorCode.DEADLINE_EXCEEDED: "the request's deadline passed on the worker",
    ErrorCode.WORKER_LOST: "the worker lost the other one",
    ErrorCode.TRANSFER_FAILED: "the KV cache could not be handed over",
    ErrorCode.OUT_OF_BLOCKS: "the worker has no KV blocks for this request",
    ErrorCode.UNKNOWN_REQUEST: "the worker does not know the request",
    ErrorCode.MISMATCH: "the workers do not fit each other",
    ErrorCode.MODEL_FAILED: "the model cannot compute this request",
}
# The maximum length of a worker's own error text in the log, in characters.
MAX_LOGGED: Final = 200


class Requests(Protocol):
    """The methods of `router.core.dispatcher.Dispatcher` that are used here."""

    @property
    def attempts(self) -> Mapping[int, Attempt]: ...
    def is_open(self, state: RequestState) -> bool: ...
    def go_on(self, state: RequestState) -> None: ...
    def finish(self, state: RequestState, usage: Usage) -> None: ...
    def finish_early(self, state: RequestState, usage: Usage) -> None: ...
    def drop_sink(self, state: RequestState) -> None: ...
    def end_first(self, attempt: Attempt) -> None: ...
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


@dataclass(eq=False, repr=False)
class Replies:
    """Applies frames from workers to requests; `dropped` counts rejected frames by reason."""

    requests: Requests
    placement: Placement
    limits: Limits
    clock: Callable[[], float]
    dropped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._refused = RepeatedLine(log.info, "worker refused", self.clock)

    def tick(self) -> None:
        self._refused.tick()

    def on_message(self, peer: bytes, message: Message) -> None:
        """Handle a message.  Raise RemoteProtocolError for a type that workers do not send."""
        frame = message.frame
        if message.tokens:
            self._on_tokens(peer, message)
            return
        if not isinstance(frame, PrefillDone | DecodeDone | Error):
            raise RemoteProtocolError(f"a worker does not send {frame.tag.name}")
        attempt = self.requests.attempts.get(frame.request_id)
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
        """Validate and apply a PREFILL_DONE, DECODE_DONE or ERROR."""
        state, vocab_size = attempt.state, self.limits.vocab_size
        if isinstance(frame, PrefillDone):
            if not attempt.is_in_prefill:
                raise RemoteProtocolError("PREFILL_DONE came twice")
            result = decode_prefill_result(message.body())
            _check_read(worker, attempt, frame, result, vocab_size)
            self._on_read(state, attempt, frame, result)
        elif isinstance(frame, DecodeDone):
            if state.phase is not Phase.DECODE:
                raise RemoteProtocolError("DECODE_DONE before DECODE_REQUEST")
            usage = decode_usage(message.body())
            _check_stop(usage.finish_reason, usage.stop_token_id, vocab_size)
            _check_logprobs(
                usage.stop_logprobs, state.request.options.logprobs, self.limits.vocab_size
            )
            usage = _checked_usage(worker, attempt, usage, self.clock())
            self.placement.learn(worker, usage)
            if (placed := attempt.placed) is not None:
                placed.decode_timeline, placed.kv_bytes = usage.timeline or b"", usage.kv_bytes
            self.requests.release_prefill(attempt)
            self.requests.release_decode(attempt)
            self.requests.finish(state, usage)
        else:
            error = self._failure(worker, attempt, frame, message)
            self.requests.fail_attempt(attempt, error, blamed=worker, spare=worker)

    def _on_read(
        self, state: RequestState, attempt: Attempt, frame: PrefillDone, result: PrefillResult
    ) -> None:
        """Handle the token of a prefill: the first token, or the next one after a failover."""
        now = self.clock()
        self.placement.on_prefill_done(attempt, result.cached_tokens, now)
        if (placed := attempt.placed) is not None:
            placed.read_at, placed.prefill_timeline = now, result.timeline or b""
        is_first, state.kv_bytes = state.first is None, frame.kv_bytes
        state.phase, state.due = Phase.HELD, min(state.deadline, now + self.limits.lease_s)
        if result.finish_reason != "stop":
            state.generated.append(result.token_id)
        # An attempt without a decode worker ends after a token, but perhaps not the request.
        is_limit_of_attempt = attempt.decode is None and result.finish_reason == "length"
        if is_limit_of_attempt and state.num_left != 0:
            result = structs.replace(result, finish_reason=None)
        try:
            if is_first:
                state.first, state.first_at = result, now
                state.sink.on_prefill(result, frame.kv_bytes)
            elif result.finish_reason != "stop":
                state.sink.on_token(result.token_id, result.logprobs)
        except Exception:
            self.requests.drop_sink(state)
        if not self.requests.is_open(state):
            return
        if result.finish_reason is not None or state.num_left == 0:
            stop_token_id = result.stop_token_id
            usage = Usage(
                finish_reason=result.finish_reason or "length",
                stop_token_id=stop_token_id,
                stop_logprobs=None if stop_token_id is None else result.logprobs,
            )
            self.requests.finish_early(state, usage)
        else:
            if attempt.decode is None:
                self.requests.end_first(attempt)
            self.requests.go_on(state)

    def _on_tokens(self, peer: bytes, message: Message) -> None:
        """Handle the tokens of one decode step: the hot path of the router."""
        tokens, logprobs = message.tokens, _scores(message)
        find, vocab_size = self.requests.attempts.get, self.limits.vocab_size
        for i, (request_id, token_id) in enumerate(tokens):
            attempt = find(request_id)
            if attempt is None:
                self.dropped["unknown_request"] += 1
                continue
            decode = attempt.decode
            if decode is None or decode.identity != peer:
                self.dropped["wrong_worker"] += 1
                continue
            scores = None if logprobs is None else logprobs[i]
            if not attempt.num_due or token_id >= vocab_size or scores is not None:
                try:
                    self._check_token(attempt, token_id, scores)
                except RemoteProtocolError as error:
                    self._on_breach(attempt, decode, error)
                    continue
            if attempt.prefill is not None:
                # A token proves that the transfer has ended.
                self.requests.release_prefill(attempt)
            attempt.num_due -= 1
            attempt.generated.append(token_id)
            try:
                attempt.sink.on_token(token_id, scores)
            except Exception:
                self.requests.drop_sink(attempt.state)

    def _check_token(self, attempt: Attempt, token_id: int, scores: Logprobs | None) -> None:
        if not attempt.num_due:
            raise RemoteProtocolError("a token that was not asked for")
        _check_vocabulary(token_id, self.limits.vocab_size)
        _check_logprobs(scores, attempt.state.request.options.logprobs, self.limits.vocab_size)

    def _failure(
        self, worker: Worker, attempt: Attempt, frame: Error, message: Message
    ) -> RequestFailed:
        """Convert a worker's ERROR to the client's error, which names it if a retry may help."""
        code, said = ErrorCode(frame.code), decode_error(message.body()).message
        if code not in SENTENCES:
            raise RemoteProtocolError(f"a worker does not end a request with {code.label}")
        self._refused.add({"worker": worker.name, "code": code.label, "reason": said[:MAX_LOGGED]})
        advice = _advice(worker, attempt) if code is ErrorCode.OUT_OF_BLOCKS else ""
        where = f" ({worker.name})" if code in AGAIN else ""
        return RequestFailed(code, SENTENCES[code] + advice + where)

    def _on_breach(self, attempt: Attempt, worker: Worker, error: RemoteProtocolError) -> None:
        """Fail an attempt whose worker violated the protocol.  Only the log gets the details."""
        self.dropped["protocol"] += 1
        tags = attempt.state.request.tags
        log.warning("bad frame", worker=worker.name, reason=error.message, **tags)
        message = f"{worker.name} broke the protocol"
        self.requests.fail_attempt(attempt, WireError(ErrorCode.INTERNAL, message), blamed=worker)


def _advice(worker: Worker, attempt: Attempt) -> str:
    """Say what to do about too few KV blocks; `can_ever_fit` was true of the prompt alone."""
    capacity = worker.detail.num_blocks * worker.detail.block_size
    is_too_long = attempt.state.total_tokens > capacity
    return (
        "; lower max_tokens, or raise --num-blocks of the workers" if is_too_long else "; try again"
    )


def _scores(message: Message) -> list[Logprobs | None] | None:
    """Return the logprobs for each token of a message, or None if it has none."""
    if not message.payload:
        return None
    logprobs = decode_map(list[Logprobs | None], message.body())
    if len(logprobs) != len(message.tokens):
        raise RemoteProtocolError("DECODE_TOKEN: logprobs do not match the headers")
    return logprobs


def _sender(
    attempt: Attempt, peer: bytes, frame: PrefillDone | DecodeDone | Error
) -> Worker | None:
    """Return the worker that sent a frame, or None if it may not send it for the attempt."""
    prefill = None if isinstance(frame, DecodeDone) else attempt.prefill
    is_of_other = isinstance(frame, PrefillDone) and not attempt.is_local
    decode = None if is_of_other else attempt.decode
    for worker in (prefill, decode):
        if worker is not None and worker.identity == peer:
            return worker
    return None


def _check_vocabulary(token_id: int, vocab_size: int) -> None:
    """Check that a token is in the vocabulary.  Like all checks, raise RemoteProtocolError."""
    if token_id >= vocab_size:
        raise RemoteProtocolError(f"token {token_id} is not below {vocab_size}, the vocabulary")


def _check_stop(reason: str | None, token_id: int | None, vocab_size: int) -> None:
    """Check that a stop token is in the vocabulary and the finish reason is `STOP`."""
    if token_id is None:
        return
    if reason != STOP:
        raise RemoteProtocolError(f"stop_token_id {token_id} with finish_reason {reason}")
    _check_vocabulary(token_id, vocab_size)


def _check_logprobs(logprobs: Logprobs | None, num_top: int | None, vocab_size: int) -> None:
    """Check that logprobs were requested, and at most `num_top` of them."""
    if logprobs is None:
        return
    if num_top is None or len(logprobs.top) > num_top:
        raise RemoteProtocolError(f"{len(logprobs.top)} top logprobs, asked for: {num_top}")
    for token_id, _ in logprobs.top:
        _check_vocabulary(token_id, vocab_size)


def _check_read(
    worker: Worker, attempt: Attempt, frame: PrefillDone, result: PrefillResult, vocab_size: int
) -> None:
    options = attempt.state.request.options
    _check_size(worker, attempt, frame.kv_bytes, result.cached_tokens)
    _check_vocabulary(result.token_id, vocab_size)
    _check_logprobs(result.logprobs, options.logprobs, vocab_size)
    _check_stop(result.finish_reason, result.stop_token_id, vocab_size)
    packed = result.prompt_logprobs
    if packed is None:
        return
    # A prompt is scored once, by the first attempt.
    num_top = None if attempt.num_generated else options.prompt_logprobs
    if num_top is None or num_rows(packed, num_top) != attempt.seq_len - 1:
        raise RemoteProtocolError("prompt_logprobs are not those that were asked for")
    _check_vocabulary(largest_top_token_id(packed), vocab_size)


def _checked_usage(worker: Worker, attempt: Attempt, usage: Usage, now: float) -> Usage:
    """Check the usage of a DECODE_DONE; return it with times capped by the time since placement."""
    _check_size(worker, attempt, usage.kv_bytes, usage.kv_skipped_tokens)
    placed_at = attempt.state.placed_at
    elapsed_s = 0.0 if placed_at is None else now - placed_at
    return structs.replace(
        usage,
        kv_seconds=min(usage.kv_seconds, elapsed_s),
        kv_transfer_seconds=min(usage.kv_transfer_seconds, elapsed_s),
    )


def _check_size(worker: Worker, attempt: Attempt, kv_bytes: int, num_tokens: int) -> None:
    if num_tokens > attempt.seq_len:
        raise RemoteProtocolError(f"{num_tokens} tokens held already, of {attempt.seq_len}")
    most_bytes = worker.detail.layout.transfer_bytes(attempt.seq_len)
    if kv_bytes > most_bytes:
        raise RemoteProtocolError(f"{kv_bytes} KV bytes, and the prompt has {most_bytes}")
