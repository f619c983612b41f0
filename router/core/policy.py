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
- A decode worker that reads the prompt itself gets no KV, and delays all that generate there.

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
        may_be_local: A decode worker may read the prompt.
    """

    now: float
    num_tokens: int
    held: Mapping[bytes, int]
    reuse: float = 0.0
    arithmetic: str = ""
    new_tokens: int | None = None
    answer_tokens: float = 0.0
    kv_bytes: float = 0.0
    may_be_local: bool = False

    def missing(self, worker: Worker) -> int:
        """The number of tokens that the worker has to read or receive; the last always."""
        return self.num_tokens - min(self.held.get(worker.identity, 0), self.num_tokens - 1)


class Choice(NamedTuple):
    """The workers of an attempt; without a prefill worker the decode worker reads the prompt."""

    prefill: Worker | None
    decode: Worker | None


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


def choose(
    prefills: Sequence[Worker], decodes: Sequence[Worker], prompt: Prompt, max_running: int
) -> Choice | None:
    """Return where a request costs the least time; None if there is no room now.

    One token needs no decode worker if there is a prefill worker.
    """
    prefill, alone = pick_prefill(prefills, prompt, max_running), None
    if prefill is not None and prompt.new_tokens == 0:
        return Choice(prefill, None)
    if prompt.may_be_local:
        alone = pick_decode(decodes, prompt, max_running, is_reader=True)
    if prefill is None:
        return None if alone is None else Choice(None, alone)
    decode = pick_decode(decodes, prompt, max_running)
    if decode is None:
        return None
    if alone is not None:
        split_s = reading_s(prefill, prompt, mean_active(prefills)) + answering_s(decode, prompt)
        if alone_s(alone, prompt) < split_s + sending_s(decode, prompt):
            return Choice(None, alone)
    return Choice(prefill, decode)


def pick_prefill(workers: Sequence[Worker], prompt: Prompt, max_running: int) -> Worker | None:
    """Return the prefill worker that reads the prompt; None if none has room now."""
    candidates = [
        worker
        for worker in workers
        if worker.is_ready
        and worker.num_active < max_running
        and can_ever_fit(worker, prompt.num_tokens)
    ]
    num_delayed = mean_active(workers)

    def order(worker: Worker) -> tuple[bool, float, int, float, int, int]:
        return (
            _differs(worker, prompt),
            reading_s(worker, prompt, num_delayed),
            worker.unread_tokens + prompt.missing(worker),
            worker.reading_since,
            worker.turn,
            worker.rank,
        )

    return min(candidates, key=order, default=None)


def pick_decode(
    workers: Sequence[Worker], prompt: Prompt, max_running: int, *, is_reader: bool = False
) -> Worker | None:
    """Return the decode worker of a request; None if none has room now.

    It gets the KV of the prompt, or with `is_reader` reads the prompt itself.  A request whose
    answer might need more blocks than a worker has is placed when all are free: most such answers
    end early, and the worker ends the others.
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

    def order(worker: Worker) -> tuple[bool, float, int, int, int, int, int]:
        cost_s = sending_s(worker, prompt) + answering_s(worker, prompt)
        return (
            _differs(worker, prompt),
            alone_s(worker, prompt) if is_reader else cost_s,
            worker.num_active + worker.num_others,
            prompt.missing(worker),
            -worker.available_blocks,
            worker.turn,
            worker.rank,
        )

    return min(candidates, key=order, default=None)


def reading_s(worker: Worker, prompt: Prompt, num_delayed: float) -> float:
    """Return the cost of reading a prompt; each second of it delays so many others."""
    missing = prompt.missing(worker)
    tokens = (1 + num_delayed) * missing + prompt.reuse * max(0, missing - worker.free_tokens)
    return worker.wait_s(prompt.now) + tokens * worker.token_s


def sending_s(worker: Worker, prompt: Prompt) -> float:
    """Return the time to send a decode worker the KV that it lacks."""
    return prompt.missing(worker) * prompt.kv_bytes * worker.byte_s


def answering_s(worker: Worker, prompt: Prompt) -> float:
    """Return the cost of an answer: its own steps, and those of others that it makes longer."""
    num_others = worker.num_active + worker.num_others
    step_s = worker.step_s + worker.sequence_s * (2 * num_others + 1)
    return step_s * prompt.answer_tokens


def alone_s(worker: Worker, prompt: Prompt) -> float:
    """Return the cost of a request that one worker reads and answers."""
    num_delayed = worker.num_active + worker.num_others
    return reading_s(worker, prompt, num_delayed) + answering_s(worker, prompt)


def mean_active(workers: Sequence[Worker]) -> float:
    """Return the mean number of requests on a worker."""
    return sum([worker.num_active for worker in workers]) / max(1, len(workers))


def _differs(worker: Worker, prompt: Prompt) -> bool:
    return bool(prompt.arithmetic) and worker.detail.arithmetic != prompt.arithmetic
