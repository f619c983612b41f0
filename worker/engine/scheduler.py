"""The scheduling policy: plans the next step from sequences and blocks, without computing it.

Each running sequence decodes one token.  Prompt chunks take the rest of the token budget, those of
running sequences first, and drafts take what is left after that.  When a running sequence needs a
block and none is free, the last sequence in order is preempted: its KV is swapped to the host
(`worker.engine.swap`) or recomputed later.  Reservations, and sequences whose KV is being sent, are
never preempted.

A prompt with the same prefix as one in this step waits for the next step and shares its blocks, so
n choices of one prompt compute it once.

Tenants share the prompt tokens of a step (`worker.engine.fair_shares`).  Within a tenant, a
sequence of priority p is ordered as if it had arrived p * ageing_s seconds earlier, so the order of
two sequences never changes and no sequence starves.  Reservations are ordered as if they had the
highest priority, but after sequences that were preempted and that arrived before them.

There is no deadlock: the first running sequence can get the blocks of all sequences that may be
preempted, the others end by themselves or when the lease of their transfer expires, and a sequence
that does not fit the empty pool fails.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Final

from worker.engine.batch import Chunk
from worker.engine.blocks import BlockPool, TrieKey
from worker.engine.deadlines import Deadlines
from worker.engine.fair_shares import Shares
from worker.engine.loads import NOTHING
from worker.engine.outgoing import Outgoing
from worker.engine.reservations import Reservations
from worker.engine.sequence import Sequence, Status
from worker.engine.settings import EngineSettings
from worker.engine.states import StatePosition
from worker.engine.swap import Swap, SwapSpace
from worker.engine.tiering import Tiering
from worker.executor.batch import BatchType

# In steps of this size, the time to compute the tokens exceeds the fixed time of a step.
LARGE_STEP_TOKENS: Final = 512
# Higher than any `wire.options.Options.priority`, which is at most 100.
RESERVATION_PRIORITY: Final = 101


@dataclass(slots=True)
class Plan:
    """One step: the chunks to compute, and the sequences whose state changed during planning.

    Attributes:
        decode: The last token of each decoding sequence, and the drafts after it.
        prefill: Chunks of prompts, or of sequences recomputed after a preemption.
        swapped_out: KV of preempted sequences to save in host memory.
        swapped_in: Saved KV to copy into the new blocks of its sequence.
        started: Sequences that run for the first time; `resumed`: again, after a preemption.
        failed: Sequences that do not fit the pool, even alone; their blocks are free.
        displaced: Ids of unclaimed reservations whose blocks another sequence needs.
        filled: The first block that each chunk of `prefill` fills; sequences that need it wait.
        overdue: Sequences past their deadline; their blocks are free unless a transfer reads them.
    """

    decode: list[Chunk] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    swapped_out: list[Swap] = field(default_factory=list)
    swapped_in: list[Swap] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)
    reserved: list[Sequence] = field(default_factory=list)
    failed: list[Sequence] = field(default_factory=list)
    overdue: list[Sequence] = field(default_factory=list)
    displaced: list[int] = field(default_factory=list)
    filled: set[TrieKey] = field(default_factory=set)

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
        return sum(chunk.num_rows for chunk in self.chunks)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefill)

    def is_mostly_prefill(self, max_ubatch_tokens: int) -> bool:
        """Return whether prompts are at least half of the step's tokens and of a large step's."""
        large = min(max_ubatch_tokens, LARGE_STEP_TOKENS)
        return bool(self.prefill) and 2 * self.num_prefill_tokens >= max(self.num_tokens, large)

    @property
    def arriving(self) -> list[StatePosition]:
        """Block table and position of each recurrent state that is received or swapped in."""
        sent = [it for it in self.reserved if it.num_cached_tokens < it.num_tokens]
        places: list[StatePosition] = [(it.block_table, it.num_tokens) for it in sent]
        return places + [(it.blocks, it.token_start + it.num_tokens) for it in self.swapped_in]

    @property
    def num_written(self) -> int:
        """An upper bound of the states that the step writes: at the end of each chunk and of the
        last full block in it."""
        return sum(1 + (chunk.num_tokens > 1) for chunk in self.chunks)

    @property
    def is_progress(self) -> bool:
        """False if the next plan would be empty too, unless the engine is called before."""
        admitted = self.started or self.reserved or self.swapped_in
        ended = self.failed or self.overdue
        return bool(self.decode or self.prefill or self.preempted or admitted or ended)


class Scheduler:
    """The queues of one worker and the policy over them."""

    def __init__(
        self,
        pool: BlockPool,
        config: EngineSettings,
        swap: SwapSpace,
        enough_tokens: int | None = None,
    ) -> None:
        """`enough_tokens`: see `worker.executor.contract.Capabilities`."""
        self.pool = pool
        self.config = config
        self.swap = swap
        self.deadlines = Deadlines()
        # Decoding alone must not exceed the budget, or sequences in prefill would starve.
        self.max_running = min(config.max_sbatch_sequences, config.max_ubatch_tokens)
        self.waiting: list[Sequence] = []  # sorted by `_order`
        self.reserving = Reservations(pool)
        self._outgoing = Outgoing(pool, receives_kv=config.receives_kv)
        self.running: list[Sequence] = []  # sorted by `_order`
        self.tiering: Tiering | None = None
        self._enough_tokens = enough_tokens or config.max_ubatch_tokens
        self._last_kind = BatchType.PREFILL

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a new sequence or reservation, which must fit the empty pool."""
        if sequence.status is Status.RESERVING:
            self.reserving.add(sequence)
        else:
            insort(self.waiting, sequence, key=self._order)
        self.deadlines.add(sequence)

    def run(self, sequence: Sequence) -> None:
        """Add a sequence that has its blocks to the running ones."""
        if sequence.status is Status.RESERVED:
            self.reserving.begin(sequence)
            self.deadlines.add(sequence)
        self._outgoing.add(sequence)
        sequence.move_to(Status.RUNNING)
        # The lowest number not in use, so that a display keeps one line per sequence.
        used = {it.slot for it in self.running}
        sequence.slot = next(number for number in count() if number not in used)
        insort(self.running, sequence, key=self._order)

    def hold(self, sequence: Sequence) -> None:
        """Stop computing a sequence but keep its blocks until `finish`."""
        self._stop(sequence)
        sequence.move_to(Status.HANDING_OVER)
        self.deadlines.remove(sequence)  # from now on only the transfer's lease limits its time

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in any state and free its blocks."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status in (Status.RESERVING, Status.RESERVED):
            self.reserving.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._stop(sequence)
        self._outgoing.discard(sequence)
        sequence.move_to(Status.FINISHED)
        self.deadlines.remove(sequence)
        self.swap.drop(sequence.request_id)
        self._give_back(sequence)

    def schedule(self, now: float = 0.0) -> Plan:
        """Plan the next step and allocate its blocks."""
        plan = Plan()
        for sequence in self.deadlines.take_overdue(now):
            self._end_overdue(sequence, plan)
        stepped = self._secure_blocks(plan)
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in stepped:
            (decoding if sequence.is_decoding else prefilling).append(sequence)
        if self._may_decode(prefilling):
            plan.decode = [Chunk(sequence, 1) for sequence in decoding]
        budget = self.config.max_ubatch_tokens - len(plan.decode)
        if self.config.prefer_pure_decode and plan.decode:
            budget = 0
        shares = self._shares(prefilling, budget)
        for sequence in prefilling:
            budget -= self._plan_chunk(sequence, budget, plan, shares)
        budget -= self._admit(plan, budget, shares)
        self._spread_budget(prefilling, plan, budget)
        if not plan.chunks:  # it should have been a prefill step, but no prompt was admitted
            plan.decode = [Chunk(sequence, 1) for sequence in decoding]
        self._add_drafts(plan)
        self._last_kind = plan.kind
        return plan

    def has_block_for_each(self) -> bool:
        """Return whether all running sequences can get their next block without a preemption."""
        pool = self.pool
        wanted = [pool.blocks_for(len(it.token_ids)) - len(it.block_table) for it in self.running]
        missing = [number for number in wanted if number > 0]
        has_windows = pool.windows is None or pool.windows.may_promise(0, 0, missing)
        return has_windows and pool.can_allocate(sum(missing))

    def _end_overdue(self, sequence: Sequence, plan: Plan) -> None:
        plan.overdue.append(sequence)
        if sequence.status is Status.RUNNING and sequence.transfer and not sequence.is_released:
            self.hold(sequence)  # a transfer may be reading its blocks; `finish` frees them
        else:
            self.finish(sequence)

    def _secure_blocks(self, plan: Plan) -> list[Sequence]:
        """Allocate blocks for the running sequences; return, in order, those that join the step."""
        stepped: list[Sequence] = []
        block_size = self.pool.block_size
        for sequence in self.running.copy():
            if len(stepped) == self.max_running:
                break
            if sequence.status is not Status.RUNNING or not sequence.is_ready:
                continue  # preempted in this loop, or waiting for its mask
            capacity = len(sequence.block_table) * block_size
            if len(sequence.token_ids) <= capacity or self._grow(sequence, plan):
                stepped.append(sequence)
        return stepped

    def _may_decode(self, prefilling: list[Sequence]) -> bool:
        if not self.config.prefer_pure_decode or self._last_kind is not BatchType.DECODE:
            return True
        return not (prefilling or self.waiting)

    def _grow(self, sequence: Sequence, plan: Plan) -> bool:
        """Allocate blocks for a sequence's tokens; return False if it was preempted or failed."""
        num_blocks = self.pool.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        if not self.pool.can_ever_fit(sequence.num_tokens):
            self.finish(sequence)
            plan.failed.append(sequence)
            return False
        while not (self.pool.can_allocate(num_blocks) and sequence.may_take(num_blocks, self.pool)):
            victim = next(s for s in reversed(self.running) if not s.transfer)
            victim.preempted_by = sequence.request_id
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.take(num_blocks, self.pool)
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        self._stop(sequence)
        sequence.move_to(Status.WAITING)
        sequence.num_preemptions += 1
        num_tokens = sequence.num_computed_tokens
        if self.swap.accepts(num_tokens):
            plan.swapped_out.append(self.swap.out(sequence, num_tokens))
        self._give_back(sequence)
        sequence.load = NOTHING if self.swap.num_tokens(sequence.request_id) else None
        insort(self.waiting, sequence, key=self._order)
        plan.preempted.append(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.slot = None

    def _shares(self, prefilling: list[Sequence], budget: int) -> Shares:
        """Divide the budget among the tenants with prompts to compute, running or waiting."""
        needs = Counter[int]()
        for sequence in chain(prefilling, self.waiting):
            needs[sequence.options.tenant] += sequence.num_uncomputed_tokens
        return Shares(needs, budget)

    def _plan_chunk(self, sequence: Sequence, budget: int, plan: Plan, shares: Shares) -> int:
        """Plan a sequence's next chunk within budget and share; return its number of tokens."""
        tenant = sequence.options.tenant
        num_tokens = min(sequence.num_uncomputed_tokens, budget, shares.left(tenant))
        if num_tokens:
            if sequence.is_decoding and self.config.prefer_pure_decode:
                return 0  # a decode step will compute its last token
            chunks = plan.decode if sequence.is_decoding else plan.prefill
            chunks.append(Chunk(sequence, num_tokens))
            plan.filled.update(sequence.filled(num_tokens, self.pool))
            shares.spend(tenant, num_tokens)
        return num_tokens

    def _spread_budget(self, prefilling: list[Sequence], plan: Plan, budget: int) -> None:
        """Extend chunks by tokens of the budget that other tenants could not use."""
        planned = {chunk.sequence for chunk in plan.prefill}
        left_out = [Chunk(sequence, 0) for sequence in prefilling if sequence not in planned]
        for index, chunk in enumerate(plan.prefill + left_out):
            if budget == 0:
                return
            sequence = chunk.sequence
            num_tokens = min(sequence.num_uncomputed_tokens, chunk.num_tokens + budget)
            plan.prefill[index : index + 1] = [Chunk(sequence, num_tokens)]
            plan.filled.update(sequence.filled(num_tokens, self.pool))
            budget -= num_tokens - chunk.num_tokens

    def _add_drafts(self, plan: Plan) -> None:
        """Add drafts to the decode chunks while the budget and the blocks last."""
        if not any(chunk.sequence.drafts for chunk in plan.decode):
            return
        budget = self.config.max_ubatch_tokens - plan.num_tokens
        for index, chunk in enumerate(plan.decode):
            sequence = chunk.sequence
            if sequence.drafts and budget > 0:
                num_drafts = self._allocate_for_drafts(sequence, min(len(sequence.drafts), budget))
                plan.decode[index] = Chunk(sequence, chunk.num_tokens, sequence.drafts[:num_drafts])
                budget -= num_drafts

    def _allocate_for_drafts(self, sequence: Sequence, num_drafts: int) -> int:
        """Allocate blocks for drafts; return how many drafts fit the sequence's blocks."""
        table, pool = sequence.block_table, self.pool
        num_free = len(table) * pool.block_size - len(sequence.token_ids)
        if num_free >= num_drafts:
            return num_drafts
        num_blocks = pool.blocks_for(num_drafts - num_free)
        if not (pool.can_allocate(num_blocks) and sequence.may_take(num_blocks, pool)):
            return num_free
        sequence.take(num_blocks, pool)
        return num_drafts

    def _admit(self, plan: Plan, budget: int, shares: Shares) -> int:
        """Start waiting sequences in order; return how many of their tokens were planned."""
        may_start = self.config.dynamic_batching or not self.running
        later: list[int] = []  # the number of blocks of each sequence left to the next step
        num_passed = 0  # sequences skipped because of `Outgoing`, or of their tenants' shares
        may_send = True
        total = budget
        while (sequence := self._head(len(later) + num_passed)) is not None:
            if sequence.status is Status.RESERVING:
                if not self._reserve(sequence, plan, later):
                    break
                continue
            if not sequence.is_ready:  # skip it until its grammar is compiled
                later.append(0)
                continue
            if not may_start or budget == 0 or len(self.running) + len(later) >= self.max_running:
                break
            may_send = may_send and self._outgoing.has_room(sequence)
            is_passed = sequence.transfer and not may_send  # no transfer overtakes another
            if is_passed or self._has_enough_prefill(sequence.options.tenant, plan, shares):
                num_passed += 1
                continue
            if self._is_better_later(sequence, plan):
                later.append(self.pool.blocks_for(sequence.num_tokens))
                continue
            if self.tiering is not None and self.tiering.is_awaited(sequence):
                later.append(0)
                continue
            max_cached_tokens = sequence.max_cached_tokens
            if not self._allocate(sequence, sequence.num_tokens, max_cached_tokens, later):
                plan.displaced = self.reserving.displace()
                break
            self.waiting.remove(sequence)
            self.run(sequence)
            self._swap_in(sequence, plan)
            (plan.resumed if sequence.num_preemptions else plan.started).append(sequence)
            budget -= self._plan_chunk(sequence, budget, plan, shares)
        return total - budget

    def _reserve(self, sequence: Sequence, plan: Plan, later: list[int]) -> bool:
        """Allocate blocks for KV that will be received; return whether there were enough."""
        num_tokens = sequence.num_tokens
        # One token more than it has, so that the first decode step needs no preemption.
        if not self._allocate(sequence, num_tokens + 1, num_tokens, later, next_token=num_tokens):
            if sequence.is_claimed:
                plan.displaced = self.reserving.displace()
            return False
        if self.pool.windows is not None:
            sequence.whole_from = self.pool.windows.whole_from(num_tokens)
            sequence.move_window(num_tokens, num_tokens + 1, self.pool)
        sequence.continue_from(num_tokens, self.pool)
        self.reserving.grant(sequence)
        sequence.move_to(Status.RESERVED)
        plan.reserved.append(sequence)
        return True

    def _has_enough_prefill(self, tenant: int, plan: Plan, shares: Shares) -> bool:
        """Return whether no further prompt of the tenant starts in this step."""
        if shares.left(tenant) == 0:
            return True
        # Another prompt would delay those already in the step and finish no sooner itself.
        is_enough = plan.num_prefill_tokens >= self._enough_tokens
        return self.config.dynamic_batching and is_enough and shares.has_spent(tenant)

    def _is_better_later(self, sequence: Sequence, plan: Plan) -> bool:
        """Whether to postpone a sequence: the step computes a block that it can share later."""
        # Without dynamic batching the next step admits no sequence.
        if not self.config.dynamic_batching or self.swap.num_tokens(sequence.request_id):
            return False
        return not plan.filled.isdisjoint(sequence.missing(self.pool))

    def _head(self, num_later: int) -> Sequence | None:
        """Return the next sequence to admit: a reservation, or a waiting one after `num_later`.

        Sequences behind it wait even if they would fit.
        """
        waiting = self.waiting[num_later] if len(self.waiting) > num_later else None
        reserving = self.reserving.head()
        if reserving is None or waiting is None:
            return reserving or waiting
        was_before = waiting.arrival < reserving.arrival or not reserving.is_claimed
        was_first = waiting.num_preemptions and was_before
        ahead = reserving.arrival_s - self.config.ageing_s * RESERVATION_PRIORITY
        return waiting if was_first or self._order(waiting) < (ahead, 0) else reserving

    def _order(self, sequence: Sequence) -> tuple[float, int]:
        """Return the sort key of a sequence; the one with the largest key is preempted first."""
        priority = sequence.options.priority
        return sequence.arrival_s - self.config.ageing_s * priority, sequence.arrival

    def _allocate(
        self,
        sequence: Sequence,
        num_tokens: int,
        max_cached_tokens: int,
        later: list[int],
        *,
        next_token: int | None = None,
    ) -> bool:
        """Allocate blocks, sharing up to `max_cached_tokens`; return whether there were enough.

        Args:
            later: The number of blocks to keep free for each sequence left to the next step.
            next_token: See `BlockPool.match_prefix`.
        """
        states = self.pool.states
        if states is not None and not states.has_room:
            return False
        keys = sequence.keys(max_cached_tokens // self.pool.block_size, self.pool.block_size)
        cached, prefix = self.pool.match_prefix(keys, next_token, sequence.root)
        num_blocks = self.pool.blocks_for(num_tokens) - len(cached)
        if not self.pool.can_allocate(num_blocks + sum(later), cached):
            return False
        if not sequence.may_take(len(cached) + num_blocks, self.pool, later):
            return False
        sequence.take(num_blocks, self.pool, cached)
        sequence.num_cached_tokens = len(cached) * self.pool.block_size
        sequence.num_computed_tokens = sequence.num_cached_tokens
        sequence.num_registered_blocks = len(cached)
        sequence.prefix = prefix
        if next_token is None:
            sequence.look_ahead(0, self.pool)
        if states is not None:
            states.enter()
            sequence.continue_from(sequence.num_cached_tokens, self.pool)
        return True

    def _swap_in(self, sequence: Sequence, plan: Plan) -> None:
        """Plan to copy back the swapped KV that is no longer in the prefix cache."""
        start, end = sequence.num_computed_tokens, self.swap.num_tokens(sequence.request_id)
        if end > start:
            blocks = tuple(sequence.block_table)
            plan.swapped_in.append(Swap(sequence, blocks, start, end - start))
            sequence.num_computed_tokens = end
            if self.pool.windows is not None:
                sequence.whole_from = self.pool.windows.whole_from(end)
                sequence.look_ahead(0, self.pool)
            sequence.continue_from(end, self.pool)
        else:
            self.swap.drop(sequence.request_id)

    def _give_back(self, sequence: Sequence) -> None:
        if self.pool.states is not None and sequence.block_table:
            self.pool.states.leave(sequence.state_block)
            sequence.state_block = None
        sequence.give_back(self.pool)
        sequence.num_computed_tokens = sequence.whole_from = 0
