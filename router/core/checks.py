"""What a worker says of a request, held against what it was asked.

The decoders bound what can be bounded without knowing the request (`wire.payloads`).  Here is what
only the router knows: the model's vocabulary, the length of the prompt, which log-probabilities
were asked for, how long it took.  And no words of a worker reach a client: it hears a sentence of
ours for each code that a worker may send.  Whoever says more breaks the protocol.
"""

from __future__ import annotations

from typing import Final

import structlog
from msgspec import structs

from router.core.failover import AGAIN
from router.core.state import Attempt
from router.core.worker import Worker
from wire.errors import ErrorCode, RemoteProtocolError, RequestFailed
from wire.frames import Error, PrefillDone
from wire.logprobs import Logprobs, largest_top_token_id, num_rows
from wire.parts import Message
from wire.payloads import PrefillResult, Usage, decode_error

log = structlog.get_logger("router")

# The codes a worker may end a request with, and what its client hears then.  SPEC 5.6.
SENTENCES: Final = {
    ErrorCode.INTERNAL: "the worker failed",
    ErrorCode.PROTOCOL: "the worker does not understand the router; run the same release on both",
    ErrorCode.INVALID_REQUEST: "the worker refused the request: an option or a token id is out of "
    "range for this model",
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: "the prompt fills the model's context; shorten it",
    ErrorCode.KV_TRANSFER_TOO_LARGE: "the KV cache of this prompt is over max_kv_transfer_bytes of "
    "a worker; shorten the prompt or raise the limit on the workers",
    ErrorCode.OVERLOADED: "the worker has no room",
    ErrorCode.NO_WORKER: "the prefill worker does not know the decode worker",
    ErrorCode.DRAINING: "the worker is leaving",
    ErrorCode.DEADLINE_EXCEEDED: "the request's deadline passed on the worker",
    ErrorCode.WORKER_LOST: "the worker lost the other one",
    ErrorCode.TRANSFER_FAILED: "the KV cache could not be handed over",
    ErrorCode.OUT_OF_BLOCKS: "the worker has no KV blocks for this request; shorten the prompt or "
    "raise --num-blocks of the workers",
    ErrorCode.UNKNOWN_REQUEST: "the worker does not know the request",
    ErrorCode.MISMATCH: "the workers do not fit each other",
    ErrorCode.MODEL_FAILED: "the model cannot compute this request",
}
# Of what a worker says in words, in the log.
MAX_LOGGED: Final = 200


def check_token(token_id: int, vocab_size: int) -> None:
    """Refuse a token that the model does not have.

    Raises:
        RemoteProtocolError: As above; so do the others here.
    """
    if token_id >= vocab_size:
        raise RemoteProtocolError(f"token {token_id} is not below {vocab_size}, the vocabulary")


def check_logprobs(logprobs: Logprobs | None, num_top: int | None, vocab_size: int) -> None:
    """Refuse log-probabilities that were not asked for, or more than `num_top` of them."""
    if logprobs is None:
        return
    if num_top is None or len(logprobs.top) > num_top:
        raise RemoteProtocolError(f"{len(logprobs.top)} top logprobs, asked for: {num_top}")
    for token_id, _ in logprobs.top:
        check_token(token_id, vocab_size)


def check_read(
    worker: Worker, attempt: Attempt, frame: PrefillDone, result: PrefillResult, vocab_size: int
) -> None:
    """Refuse a PREFILL_DONE that cannot be true of this attempt."""
    options = attempt.state.request.options
    _check_size(worker, attempt, frame.kv_bytes, result.cached_tokens)
    check_token(result.token_id, vocab_size)
    check_logprobs(result.logprobs, options.logprobs, vocab_size)
    packed = result.prompt_logprobs
    if packed is None:
        return
    # A prompt is scored once, by the first attempt.
    num_top = None if attempt.num_generated else options.prompt_logprobs
    if num_top is None or num_rows(packed, num_top) != attempt.seq_len - 1:
        raise RemoteProtocolError("prompt_logprobs are not those that were asked for")
    check_token(largest_top_token_id(packed), vocab_size)


def checked_usage(worker: Worker, attempt: Attempt, usage: Usage, now: float) -> Usage:
    """Return what a DECODE_DONE says, its times no longer than the router has waited."""
    _check_size(worker, attempt, usage.kv_bytes, usage.kv_skipped_tokens)
    placed_at = attempt.state.placed_at
    elapsed_s = 0.0 if placed_at is None else now - placed_at
    return structs.replace(
        usage,
        kv_seconds=min(usage.kv_seconds, elapsed_s),
        kv_transfer_seconds=min(usage.kv_transfer_seconds, elapsed_s),
    )


def failure(worker: Worker, frame: Error, message: Message) -> RequestFailed:
    """Return what a worker's ERROR comes to, in our words; which worker, if another may do it."""
    code, said = ErrorCode(frame.code), decode_error(message.body()).message
    if code not in SENTENCES:
        raise RemoteProtocolError(f"a worker does not end a request with {code.label}")
    log.info("worker refused", worker=worker.name, code=code.label, reason=said[:MAX_LOGGED])
    where = f" ({worker.name})" if code in AGAIN else ""
    return RequestFailed(code, SENTENCES[code] + where)


def _check_size(worker: Worker, attempt: Attempt, kv_bytes: int, num_tokens: int) -> None:
    if num_tokens > attempt.seq_len:
        raise RemoteProtocolError(f"{num_tokens} tokens held already, of {attempt.seq_len}")
    most_bytes = attempt.seq_len * worker.detail.layout.token_bytes
    if kv_bytes > most_bytes:
        raise RemoteProtocolError(f"{kv_bytes} KV bytes, and the prompt has {most_bytes}")
