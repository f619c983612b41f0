"""The choice of workers for a request: those where it costs the least time.

The cost of a worker is in seconds: those until it has done its part of this request, and those by
which that delays other requests.  Nothing in it is set by hand.  Workers measure what a step, a
prompt token and a sequence take (`wire.payloads.Speed`), the router what a byte between workers
takes, and how long answers are.

- A prompt waits until the tokens before it are read, and then until those of its own are read that
  the worker does not hold.  Each second of reading delays by a second as many others as usually
  wait on a worker.  What is read into a full cache drives as much out of it, of which some would
  be found there again.
- An answer waits for the KV that the worker does not hold, and takes a step for each token.  Its
  sequence makes the steps of all others there longer, as long as it runs.

A tie goes to the worker with the least to do, then by turn and rank, so that the choice is
deterministic and routers that share workers choose different ones.  A retry prefers workers with
the arithmetic of the first attempt: others may round differently and continue the text with another
token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from router.core.fleet import Worker

# The assumed length of an answer while a raw TCP client has not sent DECODE_REQUEST.
UNKNOWN_NEW_TOKENS: Final = 256


class Prompt(NamedTuple):
    """What placement looks at.

    Attributes:
        now: The time.
        num_tokens: The prompt's, with the tokens of earlier attempts.
        held: How many of these tokens each worker holds, by identity.
        reuse: For each token that is read, so many are found in a cache, of all prompts lately.
        arithmetic: That of an earlier attempt, or "".
        new_tokens: The most tokens that the decode worker generates; None if unknown.
        answer_tokens: The number expected.
        kv_bytes: KV bytes of a token.
    """

    now: float
    num_tokens: int
    held: Mapping[bytes, int]
    reuse: float = 0.0
    arithmetic: str = ""
    new_tokens: int | None = None
    answer_tokens: float = 0.0
    kv_bytes: float = 0.0

    def missing(self, worker: Worker) -> int:
        """The number of tokens that the worker has to read or receive; the last always."""
        return self.num_tokens - min(self.held.get(worker.identity, 0), self.num_tokens - 1)


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks for this many tokens."""
    return -(-num_tokens // block_size)


def can_ever_fit(worker: Worker, num_tokens: int) -> bool:
    """Whether the worker, when empty, could hold this many tokens and one more."""
    detail = worker.detail
    return num_tokens < min(detail.num_blocks * detail.block_size, detail.max_model_len + 1)


def blocks_to_promise(worker: Worker, num_tokens: int, max_new_tokens: int | None) -> int:
    """Return the number of free blocks that a prompt and its answer need."""
    new_tokens = UNKNOWN_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    detail = worker.detail
    return min(num_blocks(num_tokens + new_tokens, detail.block_size), detail.num_blocks)


def pick_prefill(workers: Sequence[Worker], prompt: Prompt, max_running: int) -> Worker | None:
    """Return the worker that reads the prompt; None if none has room now."""
    candidates = [
        worker
        for worker in workers
        if worker.is_ready
        and worker.num_active < max_running
        and can_ever_fit(worker, prompt.num_tokens)
    ]
    num_waiting = sum([worker.num_active for worker in workers]) / max(1, len(workers))
    return min(candidates, key=lambda it: _reading_order(it, prompt, num_waiting), default=None)


def pick_decode(workers: Sequence[Worker], prompt: Prompt, max_running: int) -> Worker | None:
    """Return the worker that gets the KV of this prompt; None if none has room now.

    A request whose answer might need more blocks than a worker has is placed when all are free:
    most such answers end early, and the worker ends the others.
    """
    num_tokens, new_tokens = prompt.num_tokens, prompt.new_tokens
    candidates = [
        worker
        for worker in workers
        if worker.is_ready
        and worker.num_active < max_running
        and can_ever_fit(worker, num_tokens)
        and blocks_to_promise(worker, num_tokens, new_tokens) <= worker.available_blocks
    ]
    return min(candidates, key=lambda it: _answering_order(it, prompt), default=None)


def _reading_order(
    worker: Worker, prompt: Prompt, num_waiting: float
) -> tuple[bool, float, int, float, int, int]:
    """Return the sort key of a prefill worker; `num_waiting` is the mean of requests on one."""
    missing = prompt.missing(worker)
    tokens = (1 + num_waiting) * missing + prompt.reuse * max(0, missing - worker.free_tokens)
    return (
        _differs(worker, prompt),
        worker.wait_s(prompt.now) + tokens * worker.token_s,
        worker.unread_tokens + missing,
        worker.reading_since,
        worker.turn,
        worker.rank,
    )


def _answering_order(worker: Worker, prompt: Prompt) -> tuple[bool, float, int, int, int, int, int]:
    """Return the sort key of a decode worker."""
    missing = prompt.missing(worker)
    num_others = worker.num_active + worker.num_others
    # Its own steps have `num_others + 1` sequences, and each of the others' one more than before.
    step_s = worker.step_s + worker.sequence_s * (2 * num_others + 1)
    send_s = missing * prompt.kv_bytes * worker.byte_s
    return (
        _differs(worker, prompt),
        send_s + step_s * prompt.answer_tokens,
        num_others,
        missing,
        -worker.available_blocks,
        worker.turn,
        worker.rank,
    )


def _differs(worker: Worker, prompt: Prompt) -> bool:
    return bool(prompt.arithmetic) and worker.detail.arithmetic != prompt.arithmetic
