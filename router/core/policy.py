"""Where a request goes: the least loaded prefill worker, the decode worker that saves most.

Prefill: fewest prompt tokens still to be read, then fewest requests.
Decode: least ``missing prompt tokens + SEQUENCE_COST x requests running there`` among the workers
with enough blocks.  Pure functions of the fleet and the prefix index; ties go to the lower rank,
so that a decision can be explained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from router.core.index import PrefixIndex
from router.core.worker import Worker
from wire.prefix import prefix_hashes

# One more running sequence weighs as much as this many prompt tokens whose KV must be handed over.
# Each sequence makes every step of its worker longer for as long as it runs; a missing prefix costs
# once.  At 128 a shared prefix of 1000 tokens draws about 8 requests to its holder before the next
# goes elsewhere and warms another worker, so a hot prefix cannot pile everything on one worker.
SEQUENCE_COST: Final = 128
# Tokens a request is taken to generate when it does not say (raw TCP before DECODE_REQUEST).
UNKNOWN_NEW_TOKENS: Final = 256


class DecodeChoice(NamedTuple):
    """A decode worker, the blocks to promise there, and the prompt tokens it holds already."""

    worker: Worker
    num_blocks: int
    held_tokens: int
    hashes: list[int]


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // block_size)


def can_ever_fit(worker: Worker, num_tokens: int) -> bool:
    """Whether an empty worker could hold this many tokens and one more."""
    detail = worker.detail
    return num_tokens < min(detail.num_blocks * detail.block_size, detail.max_model_len + 1)


def blocks_to_promise(worker: Worker, num_tokens: int, max_new_tokens: int | None) -> int:
    """Blocks that a decode worker must have to spare for a prompt and what follows it."""
    new_tokens = UNKNOWN_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    detail = worker.detail
    return min(num_blocks(num_tokens + new_tokens, detail.block_size), detail.num_blocks)


def pick_prefill(workers: Sequence[Worker], num_tokens: int, max_running: int) -> Worker | None:
    """Return the prefill worker with the least left to read; None when none has room now."""
    candidates = [
        worker
        for worker in workers
        if worker.is_ready and worker.num_active < max_running and can_ever_fit(worker, num_tokens)
    ]
    return min(candidates, key=_prefill_load, default=None)


def pick_decode(
    workers: Sequence[Worker],
    token_ids: Sequence[int],
    max_new_tokens: int | None,
    index: PrefixIndex,
    max_running: int,
) -> DecodeChoice | None:
    """Return the decode worker to hand this prompt to; None when none has room now.

    A request that could outgrow a whole worker is let in when that worker has all its blocks to
    spare: most such requests end early, and the worker fails the one that does not.
    """
    hashes: dict[int, list[int]] = {}
    best: DecodeChoice | None = None
    least: tuple[int, int, int] | None = None
    for worker in workers:
        if not worker.is_ready or worker.num_active >= max_running:
            continue
        if not can_ever_fit(worker, len(token_ids)):
            continue
        size = worker.detail.block_size
        needed = blocks_to_promise(worker, len(token_ids), max_new_tokens)
        if needed > worker.available_blocks:
            continue
        if size not in hashes:
            hashes[size] = prefix_hashes(token_ids, size)
        held = index.longest(worker.identity, hashes[size]) * size
        cost = len(token_ids) - held + SEQUENCE_COST * worker.num_active
        key = cost, -worker.available_blocks, worker.rank
        if least is None or key < least:
            least, best = key, DecodeChoice(worker, needed, held, hashes[size])
    return best


def _prefill_load(worker: Worker) -> tuple[int, int, int]:
    return worker.prompt_tokens, worker.num_active, worker.rank
