"""The choice of workers for a request, and the index of prefixes on decode workers.

Prefill: the worker with the fewest prompt tokens still to be read, then the fewest requests.
Decode: the worker with the least ``missing prompt tokens + SEQUENCE_COST x requests there``, among
those with enough free blocks; missing are the tokens whose KV it does not hold already.  Requests
of other routers count as of its last heartbeat; those on a prefill worker are gone by then.
A tie goes to more free blocks, then by turn and rank, so that the choice is deterministic and
routers that share workers choose different ones.

A retry prefers workers with the arithmetic of the first attempt: others may round differently and
continue the text with another token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from router.core.fleet import Worker
from wire.prefix import prefix_hashes

# Hashes kept per worker, however many blocks it claims: 40 MB of the router's memory.
MAX_HELD: Final = 1 << 18
# One more request on a worker weighs as much as this many prompt tokens whose KV has to be sent.
# A request slows every step of its worker for as long as it runs; a missing prefix costs only once.
# At 128 a shared prefix of 1000 tokens draws about 8 requests to the worker that holds it; the next
# goes elsewhere, and then two workers hold it: no prefix can pile every request on one worker.
SEQUENCE_COST: Final = 128
# The assumed length of an answer while a raw TCP client has not sent DECODE_REQUEST.
UNKNOWN_NEW_TOKENS: Final = 256


class PrefixIndex:
    """The prefixes whose KV each decode worker holds, as far as the router knows.

    Each worker has a set of prefix hashes (`wire.prefix`) in LRU order, at most as many as it has
    blocks, or `max_held`.  Heartbeats report stored and evicted blocks; the blocks of a placed
    request are added at once, for equal prompts before the next heartbeat.  A wrong entry costs a
    transfer, never a wrong answer: the decode worker itself says what it holds.
    """

    def __init__(self, max_held: int = MAX_HELD) -> None:
        self._max_held = max_held
        self._held: dict[bytes, OrderedDict[int, None]] = {}
        self._capacity: dict[bytes, int] = {}

    def add(self, identity: bytes, num_blocks: int) -> None:
        """Add a worker with this many blocks, all empty."""
        self._held[identity] = OrderedDict()
        self._capacity[identity] = min(num_blocks, self._max_held)

    def remove(self, identity: bytes) -> None:
        """Forget a worker; idempotent."""
        self._held.pop(identity, None)
        self._capacity.pop(identity, None)

    def size(self, identity: bytes) -> int:
        """Return the number of hashes kept of a worker."""
        return len(self._held.get(identity, ()))

    def store(self, identity: bytes, hashes: Sequence[int]) -> None:
        """Note that the worker holds these blocks of one prompt, or will soon."""
        held = self._held.get(identity)
        if held is None:
            return
        # Backwards, so that the last block is evicted first: without the first, none is usable.
        for value in reversed(hashes):
            held[value] = None
            held.move_to_end(value)
        for _ in range(len(held) - self._capacity[identity]):
            held.popitem(last=False)

    def evict(self, identity: bytes, hashes: Iterable[int]) -> None:
        """Note that the worker has evicted these blocks."""
        held = self._held.get(identity)
        if held is None:
            return
        for value in hashes:
            held.pop(value, None)

    def longest(self, identity: bytes, hashes: Sequence[int]) -> int:
        """Return the number of leading blocks of this prompt that the worker holds."""
        held = self._held.get(identity)
        if not held:
            return 0
        for count, value in enumerate(hashes):
            if value not in held:
                return count
        return len(hashes)


class DecodeChoice(NamedTuple):
    """A decode worker, the blocks to reserve there, and the prompt's prefix hashes."""

    worker: Worker
    num_blocks: int
    hashes: list[int]


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


def pick_prefill(
    workers: Sequence[Worker], num_tokens: int, max_running: int, arithmetic: str = ""
) -> Worker | None:
    """Return the prefill worker with the least left to read; None if none has room now."""
    candidates = [
        worker
        for worker in workers
        if worker.is_ready and worker.num_active < max_running and can_ever_fit(worker, num_tokens)
    ]
    return min(candidates, key=lambda it: (_differs(it, arithmetic), *_load(it)), default=None)


def pick_decode(
    workers: Sequence[Worker],
    token_ids: Sequence[int],
    max_new_tokens: int | None,
    index: PrefixIndex,
    max_running: int,
    arithmetic: str = "",
) -> DecodeChoice | None:
    """Return the decode worker that gets the KV of this prompt; None if none has room now.

    A request whose answer might need more blocks than a worker has is placed when all are free:
    most such answers end early, and the worker ends the others.
    """
    hashes: dict[int, list[int]] = {}
    best: DecodeChoice | None = None
    least: tuple[bool, int, int, int, int] | None = None
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
        cost = len(token_ids) - held + SEQUENCE_COST * (worker.num_active + worker.num_others)
        order = worker.turn, worker.rank
        key = _differs(worker, arithmetic), cost, -worker.available_blocks, *order
        if least is None or key < least:
            least, best = key, DecodeChoice(worker, needed, hashes[size])
    return best


def _differs(worker: Worker, arithmetic: str) -> bool:
    return bool(arithmetic) and worker.detail.arithmetic != arithmetic


def _load(worker: Worker) -> tuple[int, int, int, int]:
    return worker.prompt_tokens, worker.num_active, worker.turn, worker.rank
