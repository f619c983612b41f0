"""What the next step computes: a pure policy over sequences and blocks, its decision an object.

Generation first, one token for each running sequence; then prompt chunks in what is left of the
token budget; then admissions.  Reservations of the decode role go ahead of new work, and behind
work that was preempted before they came.  When generation needs a block and there is none, the
sequence that is last in order gives up its blocks and is recomputed later.  Only running sequences
that can be recomputed here are preempted: never a reservation into which KV arrives, never a
sequence whose KV is being handed over.

It cannot deadlock.  The first running sequence in order can take the blocks of all that may be
preempted; what may not ends by itself or by its peer's lease; and a sequence that does not fit the
empty pool is failed.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from worker.batch import BatchConfig, BatchType, Chunk
from worker.blocks import BlockPool
from worker.sequence import Sequence, Status


@dataclass(slots=True)
class Plan:
    """One step: what is computed, and what the making of the plan did to whom.

    Attributes:
        decode: One token of each, the one sampled last.
        prefill: Pieces of prompts, or of what a preemption made to be computed again.
        preempted: They lost their blocks and wait.
        started: They got their first blocks now and were never running before.
        reserved: Reservations that got their blocks now.
        failed: They can never fit and hold nothing any more.
    """

    decode: list[Chunk] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    reserved: list[Sequence] = field(default_factory=list)
    failed: list[Sequence] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        return self.decode + self.prefill

    @property
    def kind(self) -> BatchType:
        if not self.prefill:
            return BatchType.DECODE
        return BatchType.MIXED if self.decode else BatchType.PREFILL

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.num_tokens for chunk in self.prefill)

    @property
    def is_progress(self) -> bool:
        """Whether anything changed: if not, planning again is no use until someone else acts."""
        return any(
            (self.decode, self.prefill, self.preempted, self.started, self.reserved, self.failed)
        )


class Scheduler:
    """The queues of one worker and the policy over them."""

    def __init__(self, pool: BlockPool, config: BatchConfig) -> None:
        self.pool = pool
        self.config = config
        # Generation alone must never fill the budget, or prompts under way would starve.
        self.max_running = min(config.max_sbatch_sequences, config.max_ubatch_tokens)
        self.waiting: list[Sequence] = []  # in order
        self.reserving: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order
        self._last_kind = BatchType.PREFILL

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits the pool when it is alone."""
        return self.pool.blocks_for(num_tokens) <= self.pool.num_blocks

    def enqueue(self, sequence: Sequence) -> None:
        """Take a new sequence, or a reservation; both must be able to fit."""
        if sequence.status is Status.RESERVING:
            self.reserving.append(sequence)
        else:
            insort(self.waiting, sequence, key=_order)

    def run(self, sequence: Sequence) -> None:
        """Let a reserved sequence generate: its KV is there."""
        sequence.move_to(Status.RUNNING)
        insort(self.running, sequence, key=_order)

    def hold(self, sequence: Sequence) -> None:
        """Keep the blocks of a sequence that is computed, until `finish`."""
        self.running.remove(sequence)
        sequence.move_to(Status.HANDING_OVER)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in whatever state it is and give back its blocks."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RESERVING:
            self.reserving.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        sequence.move_to(Status.FINISHED)
        self._give_back(sequence)

    def schedule(self) -> Plan:
        """Decide the next step; blocks are allocated for everything in the plan."""
        plan = Plan()
        stepped = self._secure_blocks(plan)
        decoding = [sequence for sequence in stepped if sequence.is_decoding]
        reading = [sequence for sequence in stepped if not sequence.is_decoding]
        if self._is_turn_of_decode(reading):
            plan.decode = [Chunk(sequence, 1) for sequence in decoding]
        budget = self.config.max_ubatch_tokens - len(plan.decode)
        if self.config.prefer_pure_decode and plan.decode:
            budget = 0
        for sequence in reading:
            budget -= self._plan_chunk(sequence, budget, plan)
        self._admit(plan, budget)
        if not plan.chunks:  # a turn given to prompts, and none could be admitted
            plan.decode = [Chunk(sequence, 1) for sequence in decoding]
        self._last_kind = plan.kind
        return plan

    def _secure_blocks(self, plan: Plan) -> list[Sequence]:
        """Return, in order, the running sequences that take part; each has all blocks it needs."""
        stepped: list[Sequence] = []
        for sequence in self.running.copy():
            if len(stepped) == self.max_running:
                break
            if sequence.status is Status.RUNNING and self._grow(sequence, plan):
                stepped.append(sequence)
        return stepped

    def _is_turn_of_decode(self, reading: list[Sequence]) -> bool:
        if not self.config.prefer_pure_decode or self._last_kind is not BatchType.DECODE:
            return True
        return not (reading or self.waiting)

    def _grow(self, sequence: Sequence, plan: Plan) -> bool:
        """Get the block that the next token needs, if any; say whether the sequence still runs."""
        num_blocks = self.pool.blocks_for(sequence.num_tokens) - sequence.block_table.num_blocks
        if num_blocks <= 0:
            return True
        if not self.can_ever_fit(sequence.num_tokens):
            self.finish(sequence)
            plan.failed.append(sequence)
            return False
        while not self.pool.can_allocate(num_blocks):
            victim = next(s for s in reversed(self.running) if not s.hand_over)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.block_table.extend(self.pool.allocate(num_blocks))
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        self.running.remove(sequence)
        sequence.move_to(Status.WAITING)
        sequence.num_preemptions += 1
        self._give_back(sequence)
        insort(self.waiting, sequence, key=_order)
        plan.preempted.append(sequence)

    def _plan_chunk(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        """Plan as much of the sequence as the budget has; return how many tokens that is."""
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        if num_tokens:
            plan.prefill.append(Chunk(sequence, num_tokens))
        return num_tokens

    def _admit(self, plan: Plan, budget: int) -> None:
        may_start = self.config.dynamic_batching or not self.running
        while (sequence := self._head()) is not None:
            if sequence.status is Status.RESERVING:
                # One token more than there are: the first step must not preempt.
                if not self._allocate(sequence, sequence.num_tokens + 1, sequence.num_tokens):
                    return
                self.reserving.popleft()
                sequence.move_to(Status.RESERVED)
                plan.reserved.append(sequence)
                continue
            if not may_start or budget == 0 or len(self.running) >= self.max_running:
                return
            if not self._allocate(sequence, sequence.num_tokens, sequence.max_cached_tokens):
                return
            self.waiting.remove(sequence)
            sequence.move_to(Status.RUNNING)
            insort(self.running, sequence, key=_order)
            if not sequence.num_preemptions:
                plan.started.append(sequence)
            budget -= self._plan_chunk(sequence, budget, plan)

    def _head(self) -> Sequence | None:
        """Who is next to get blocks; whoever is behind waits even if it would fit."""
        waiting = self.waiting[0] if self.waiting else None
        reserving = self.reserving[0] if self.reserving else None
        if reserving is None or waiting is None:
            return reserving or waiting
        was_first = waiting.num_preemptions and waiting.arrival < reserving.arrival
        return waiting if was_first else reserving

    def _allocate(self, sequence: Sequence, num_tokens: int, max_cached_tokens: int) -> bool:
        """Get blocks for `num_tokens`, sharing cached ones for up to `max_cached_tokens`."""
        keys = sequence.keys(max_cached_tokens // self.pool.block_size, self.pool.block_size)
        cached, prefix = self.pool.match_prefix(keys)
        num_blocks = self.pool.blocks_for(num_tokens) - len(cached)
        if not self.pool.can_allocate(num_blocks, cached):
            return False
        sequence.block_table.extend(self.pool.allocate(num_blocks, cached))
        sequence.num_cached_tokens = len(cached) * self.pool.block_size
        sequence.num_computed_tokens = sequence.num_cached_tokens
        sequence.num_registered_blocks = len(cached)
        sequence.prefix = prefix
        return True

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_table.blocks.tolist())
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0

    def register(self, sequence: Sequence) -> None:
        """Put the blocks that became full of computed tokens into the prefix cache."""
        num_full = sequence.num_computed_tokens // self.pool.block_size
        if num_full == sequence.num_registered_blocks:
            return
        keys = sequence.keys(num_full, self.pool.block_size)
        blocks = sequence.block_table.blocks.tolist()
        for index in range(sequence.num_registered_blocks, num_full):
            sequence.prefix = self.pool.register(sequence.prefix, keys[index], blocks[index])
        sequence.num_registered_blocks = num_full


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
