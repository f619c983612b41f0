"""The engine of one worker: `step` drafts, schedules, runs the executor, samples and commits.

All calls come from one thread (`worker.engine.thread`).  `add` queues a prompt to prefill here;
`reserve` and `begin_decode` decode a prompt that another worker has prefilled.  If the executor is
a `Drawer`, the next step starts before the last one is committed (`worker.engine.in_flight`).

If the executor raises `SequenceFailed`, or a request cannot be served, only that sequence ends,
with the output `Failed`.  `step` propagates any other exception: the state of the device is then
unknown, so the process has to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from collections.abc import Sequence as Many
from itertools import chain, count
from typing import Any, Final

from wire.errors import ErrorCode, LocalProtocolError
from wire.options import Options
from wire.payloads import Load
from worker.compute.contract import KVCache
from worker.engine.batch import Chunk, build
from worker.engine.blocks import BlockPool
from worker.engine.in_flight import Flight
from worker.engine.outputs import Failed, Output
from worker.engine.recorder import Recorder
from worker.engine.scheduler import Plan, Scheduler
from worker.engine.sequence import Problem, Sequence, Status
from worker.engine.settings import EngineSettings
from worker.engine.speculation import Speculation
from worker.engine.states import states_of
from worker.engine.stats import Counters, Slots, Stats, load_of
from worker.engine.step import commit, compute, report
from worker.engine.step_costs import StepCosts
from worker.engine.swap import SwapSpace
from worker.engine.tiering import Tiering
from worker.engine.windows import windows_of
from worker.executor.batch import Batch, BatchType
from worker.executor.contract import (
    Drawer,
    Executor,
    SampledToken,
    Scorer,
    SequenceFailed,
    Structurer,
)
from worker.tiers.disk_tier import HeldPrefixes
from worker.tiers.store import TierStore

# Opens tiers for the blocks of a cache; they report the prefixes that they hold.
OpenTiers = Callable[[KVCache, HeldPrefixes], TierStore | None]
# How long an idle engine waits for a grammar before it checks for new calls again.
_COMPILER_LOOK_S: Final = 0.002


class Engine:
    """Owns the block pool and drives the executor.

    `cache` is the executor's KV cache, with which callers pack and unpack the blocks in outputs.
    If `announce` is set, `step` calls it with outputs such as `Started`, `Reserved` and `Failed`
    before it computes the batch, so that transfers start early.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        num_blocks: int,
        block_size: int,
        num_states: int | None = None,
        num_window_blocks: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> None:
        """Allocate the KV cache; `settings` are those of `worker.engine.settings.EngineSettings`.

        Args:
            num_states: Slots for recurrent states; by default `MemoryRequirements.num_states`.
            num_window_blocks: Blocks for sliding-window layers; None to compute the number.

        Raises:
            TypeError: A setting does not exist.
            ValueError: A setting is out of its range.
        """
        self.config = EngineSettings(**settings).within(executor.capabilities)
        self.info = executor.info
        memory, step_tokens = executor.capabilities.memory, self.config.max_ubatch_tokens
        room = dict[str, int]()
        if self.info.layout.has_state:
            needed = memory.num_states(num_blocks, block_size)
            room["num_states"] = needed if num_states is None else num_states
        if self.info.layout.windows:
            needed = memory.num_window_blocks(num_blocks, block_size, step_tokens) or num_blocks
            room["num_window_blocks"] = needed if num_window_blocks is None else num_window_blocks
        self.cache = executor.allocate(num_blocks, block_size, **room)
        self.pool = BlockPool(
            num_blocks,
            block_size,
            enable_prefix_cache=self.config.prefix_cache,
            windows=windows_of(self.cache, step_tokens),
            states=states_of(self.cache),
        )
        self.swap = SwapSpace(self.cache, self.config.swap_bytes, clock)
        enough = executor.capabilities.enough_tokens
        self.scheduler = Scheduler(self.pool, self.config, self.swap, enough)
        self.counters = Counters()
        self._costs = StepCosts()
        self._recorder = Recorder()
        self.announce: Callable[[list[Output]], object] | None = None
        self._executor = executor
        self._speculation = Speculation(self.config.speculate, self.info)
        self._clock = clock
        self._arrivals = count()
        self._sequences: dict[int, Sequence] = {}
        self._outputs: list[Output] = []
        self._compiling: list[Sequence] = []  # sequences whose grammar or mask is not ready
        self._drawer: Drawer | None = None
        # Drafting needs the last tokens on the host, and a step overwrites the earlier states.
        if isinstance(executor, Drawer) and not self.config.speculate and self.pool.states is None:
            self._drawer = executor
        self._flight: Flight | None = None
        self._is_stalled = False
        self.tiering: Tiering | None = None

    def add_tiers(self, open_tiers: OpenTiers) -> None:
        """Open tiers below the block pool, before the first step; no-op without a prefix cache.

        Raises:
            ValueError: The room of a tier does not hold one block.
        """
        store = open_tiers(self.cache, self.pool) if self.config.prefix_cache else None
        if store is not None:
            self.tiering = Tiering(self.pool, store, self.seconds_to_compute, self._clock)
            self.scheduler.tiering = self.tiering

    # Calls of the worker's role.  Their results, including rejections, are outputs of `step`.

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt; ignore a request id that is already in use."""
        sequence.bind(self.info)
        self._accept(sequence, sequence.problem(self.info, self.pool))

    def reserve(
        self,
        request_id: int,
        token_ids: Many[int],
        offered_by: str = "",
        *,
        cache_salt: str = "",
        is_claimed: bool = False,
    ) -> None:
        """Queue a reservation of blocks for KV that the prefill worker `offered_by` will send."""
        options = Options(cache_salt=cache_salt)  # the others come with the claim
        sequence = Sequence(
            request_id, token_ids, options, offered_by=offered_by, status=Status.RESERVING
        )
        sequence.is_claimed = is_claimed
        self._accept(sequence, sequence.problem(self.info, self.pool, 1))

    def claim(self, request_id: int) -> None:
        """Record that a router has requested a reservation; ignore an unknown id."""
        self._is_stalled = False
        if (sequence := self._sequences.get(request_id)) is not None:
            self.scheduler.reserving.claim(sequence)

    def let_others_pass(self, request_id: int) -> None:
        """Stop other reservations from waiting to share this one's KV; ignore an unknown id."""
        self._is_stalled = False
        if (sequence := self._sequences.get(request_id)) is not None:
            self.scheduler.reserving.let_others_pass(sequence)

    def begin_decode(
        self,
        request_id: int,
        token_ids: Many[int],
        options: Options,
        max_new_tokens: int | None = None,
        requested_s: float | None = None,
    ) -> None:
        """Decode a reservation whose KV is complete, and let other sequences share its KV.

        `token_ids` are the reserved tokens, followed by at least one sampled token.  The deadline
        counts from `requested_s` on the engine's clock, by default from now.

        Raises:
            LocalProtocolError: The sequence exists, but is not a reservation that has its blocks.
        """
        self._is_stalled = False
        sequence = self._sequences.get(request_id)
        if sequence is None:
            self._fail(request_id, ErrorCode.UNKNOWN_REQUEST, "there is no such reservation")
            return
        if sequence.status is not Status.RESERVED:
            raise LocalProtocolError(
                f"request {request_id} cannot begin to decode while {sequence.status}"
            )
        problem = sequence.resume(list(token_ids), options, max_new_tokens)
        if problem := problem or sequence.problem(self.info, self.pool) or self._compile(sequence):
            self._finish(sequence)
            self._fail(request_id, *problem)
            return
        sequence.started_s = self._clock()
        sequence.set_deadline(sequence.started_s if requested_s is None else requested_s)
        sequence.bind(self.info)
        self.scheduler.run(sequence)

    def release(self, request_id: int) -> None:
        """Free the blocks of a sequence whose KV was sent, but not before its first token."""
        self._is_stalled = False
        if (sequence := self._sequences.get(request_id)) is None:
            return
        sequence.is_released = True
        if sequence.status is Status.HANDING_OVER:
            self._finish(sequence)

    def halt(self, request_id: int) -> None:
        """Stop computing a sequence, but keep its blocks for a transfer until `cancel`."""
        self._is_stalled = False
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.status is Status.RUNNING:
            self.counters.cancelled += 1
            self.scheduler.hold(sequence)

    def cancel(self, request_id: int) -> None:
        """End a sequence in any state and free its blocks; ignore an unknown id."""
        self._is_stalled = False
        if (sequence := self._sequences.get(request_id)) is not None:
            # A sequence whose KV is being sent was counted when it stopped.
            self.counters.cancelled += sequence.status is not Status.HANDING_OVER
            self._finish(sequence)

    # The step.

    def step(self) -> list[Output]:
        """Plan one batch, compute it or start it on the device; return the outputs."""
        was_in_flight = self._flight is not None
        if was_in_flight and not self._can_plan_ahead():
            self.counters.forward_s += self._land()
        start_s = self._clock()
        if self.tiering is not None:
            self.tiering.collect()
        if self._compiling:
            self._look_at_grammars()
        self._speculation.draft(self.scheduler.running)
        draft_s = self._clock()
        plan = self.scheduler.schedule(draft_s)
        self.swap.carry_out(plan.swapped_out)
        if self.pool.states is not None:
            self.pool.states.prepare(plan.arriving, plan.num_written)
        self.swap.carry_in(plan.swapped_in)
        self._report(plan)
        if plan.chunks:
            executor_s = self._compute(plan)
            end_s = self._clock()
            self.counters.measure(draft_s - start_s, executor_s, end_s - draft_s)
            self._costs.observe(end_s - start_s, plan.num_prefill_tokens, len(plan.decode))
        elif self._flight is not None:
            self.counters.forward_s += self._land()
        elif self._compiling and self._compiling[0].structured is not None:
            self._compiling[0].structured.wait(_COMPILER_LOOK_S)
        self._is_stalled = not (plan.is_progress or was_in_flight)
        if self.tiering is not None:
            self.tiering.save()
        return self._take_outputs()

    def has_work(self) -> bool:
        """Return whether `step` has anything to do before another method is called."""
        if self._outputs or self.scheduler.running or self._compiling or self._flight is not None:
            return True
        if not self._is_stalled and (self.scheduler.waiting or self.scheduler.reserving):
            return True
        has_results = self.tiering is not None and self.tiering.has_results
        return has_results or self.idle_s() == 0.0

    def idle_s(self) -> float | None:
        """Return the seconds until the next deadline or look at a load; None if there is none."""
        due_s = None if self.tiering is None else self.tiering.due_s
        times = [it for it in (self.scheduler.deadlines.next_s, due_s) if it is not None]
        return max(0.0, min(times) - self._clock()) if times else None

    def seconds_to_compute(self, num_tokens: int) -> float | None:
        """Return the measured time to compute a prompt's tokens; None before any was computed."""
        speed = self._costs.speed()
        if speed.token_s is None or speed.step_s is None:
            return None
        num_steps = -(-num_tokens // self.config.max_ubatch_tokens)
        return num_steps * speed.step_s + num_tokens * speed.token_s

    def _report(self, plan: Plan) -> None:
        self.counters.count(plan)
        self._recorder.on_plan(plan, self._clock())
        for sequence in plan.failed + plan.overdue:
            if sequence.status is Status.FINISHED:
                self._forget(sequence)
        self._outputs += report(plan, self.pool)
        if self.announce is not None and self._outputs:
            self.announce(self._take_outputs())

    def _compute(self, plan: Plan) -> float:
        """Compute a plan or start it on the device; return the seconds spent in the executor."""
        chunks = plan.chunks
        batch, drawer = self._build_batch(plan.kind, chunks)
        executor_s = 0.0
        if drawer is None and self._flight is not None:  # the host needs the last tokens
            executor_s = self._land()
            chunks = [chunk for chunk in chunks if chunk.sequence.status is Status.RUNNING]
            if not chunks:
                return executor_s
            batch, _ = self._build_batch(plan.kind, chunks)
        start_s = self._clock()
        outcome = compute(self._executor, batch, drawer)
        executor_s += self._clock() - start_s
        executor_s += self._land()
        if isinstance(outcome, SequenceFailed):
            self._give_up(chunks, outcome)
            return executor_s
        if isinstance(outcome, list):
            self._commit(chunks, outcome)
        else:
            self._flight = Flight(chunks, batch.samplings, outcome)
            if plan.prefill:  # the next plan may share or send its blocks
                executor_s += self._land()
        if plan.is_mostly_prefill(self.config.max_ubatch_tokens):
            self.swap.costs.observe_prefill(plan.num_prefill_tokens, executor_s)
        return executor_s

    def _build_batch(self, kind: BatchType, chunks: list[Chunk]) -> tuple[Batch, Drawer | None]:
        """Build the batch; also return the drawer if the device can sample all its tokens."""
        if self.pool.windows is not None:
            for chunk in chunks:
                chunk.sequence.look_ahead(chunk.num_rows, self.pool)
        batch, drawer = build(kind, chunks, self.pool.block_size), self._drawer
        return batch, drawer if drawer is not None and drawer.can_draw(batch) else None

    def _land(self) -> float:
        """Commit the step in flight, if any; return how many seconds the host waited for it."""
        if self._flight is None:
            return 0.0
        start_s = self._clock()
        landed, self._flight = self._flight.land(), None
        end_s = self._clock()
        self._commit(*landed)
        return end_s - start_s

    def _can_plan_ahead(self) -> bool:
        """Return whether the next step can be planned before the step in flight is committed.

        It cannot if a deadline has passed or a sequence may be preempted, for plans would differ.
        """
        return self.scheduler.has_block_for_each() and self.idle_s() != 0.0

    def _commit(self, chunks: list[Chunk], sampled: list[SampledToken]) -> None:
        outputs, ended = commit(chunks, sampled, self.pool, self.counters)
        self._outputs += self._recorder.on_commit(ended, self._clock()) + outputs
        self.counters.finished += len(ended)
        for sequence in ended:
            self._end(sequence)
        for sequence in (chunk.sequence for chunk in chunks):
            structured = sequence.structured
            if structured is not None and structured.is_slow and sequence.status is Status.RUNNING:
                structured.make_mask(sequence.token_ids)
                sequence.is_ready = False
                self._compiling.append(sequence)

    def _give_up(self, chunks: list[Chunk], failure: SequenceFailed) -> None:
        """End the failed sequence, and sequences whose structures failed in the same step.

        The step is rolled back; the next step computes the other sequences again.
        """
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            if sequence.status is not Status.RUNNING:
                continue  # it ended in the previous step
            sequence.undo(self.pool)
            if index == failure.index:
                self._fail(sequence.request_id, failure.code, failure.message)
                self._end(sequence)
            elif sequence.structured is not None and (problem := sequence.structured.problem):
                self._fail(sequence.request_id, ErrorCode.INVALID_REQUEST, problem)
                self._end(sequence)

    def _look_at_grammars(self) -> None:
        """Resume sequences whose grammar or mask is ready; fail those whose grammar is invalid."""
        waiting, self._compiling = self._compiling, []
        for sequence in waiting:
            if sequence.status is Status.FINISHED or sequence.structured is None:
                continue
            # Copied once a step, because another thread may complete the mask at any moment.
            sequence.is_ready = sequence.structured.is_ready
            if not sequence.is_ready:
                self._compiling.append(sequence)
            elif (problem := sequence.structured.problem) is not None:
                self._finish(sequence)
                self._fail(sequence.request_id, ErrorCode.INVALID_REQUEST, problem)

    def _compile(self, sequence: Sequence) -> Problem | None:
        """Start to compile the sequence's structure, if any; return the problem if it fails."""
        options, structure = sequence.options, sequence.options.structure
        if structure is None:
            return None
        if not isinstance(self._executor, Structurer):
            return ErrorCode.INVALID_REQUEST, "this model cannot be held to a structure"
        sequence.structured = self._executor.structured(
            structure, sequence.prompt_len, options.tenant, options.cache_salt
        )
        sequence.is_ready = False
        self._compiling.append(sequence)
        return None

    def _end(self, sequence: Sequence) -> None:
        if sequence.transfer and not sequence.is_released:
            self.scheduler.hold(sequence)
        else:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        if sequence.structured is not None:
            sequence.structured.cancel()
        self._speculation.forget(sequence.request_id)

    def _take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _accept(self, sequence: Sequence, problem: Problem | None) -> None:
        self._is_stalled = False
        if sequence.request_id in self._sequences:
            return
        if sequence.scores and not isinstance(self._executor, Scorer):
            problem = ErrorCode.INVALID_REQUEST, "this model gives no prompt_logprobs"
        problem = problem or self._compile(sequence)
        if problem is not None:
            self._fail(sequence.request_id, *problem)
            return
        sequence.arrive(next(self._arrivals), self._clock())
        self._sequences[sequence.request_id] = sequence
        self.scheduler.enqueue(sequence)

    def _fail(self, request_id: int, code: ErrorCode, message: str) -> None:
        self.counters.failed += 1
        self._outputs.append(Failed(request_id, code, message))

    def close_tiers(self, wait_s: float) -> None:
        """Write the last blocks to disk, for at most `wait_s` seconds; no step may follow."""
        if self.tiering is not None:
            self.tiering.close(wait_s)

    # Statistics.

    @property
    def request_ids(self) -> Set[int]:
        return self._sequences.keys()

    @property
    def num_running(self) -> int:
        """The number of sequences with blocks: running, reserved, or being sent."""
        return len(self._sequences) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.reserving)

    @property
    def num_tier_blocks(self) -> int:
        """The most blocks that the tiers below the pool hold together."""
        return 0 if self.tiering is None else self.tiering.store.max_blocks

    @property
    def steps(self) -> int:
        return self.counters.steps

    def slots(self) -> Slots:
        return Slots.of(self.scheduler.running, self.scheduler.max_running, self._clock())

    def stats(self) -> Stats:
        return Stats.of(self.scheduler, self.counters)

    def load(self) -> Load:
        """Return a heartbeat's figures; prefix hashes since the last call.  From any thread."""
        return load_of(self.pool, self.counters, self._costs.speed(), self.tiering)

    def check(self) -> None:
        """Assert that every block is accounted for; call it only between steps."""
        sequences = self._sequences.values()
        copies = () if self.tiering is None else self.tiering.tables
        self.pool.check(chain((sequence.block_table for sequence in sequences), copies))
        if self.pool.windows is not None:
            reached = (sequence.reached for sequence in sequences)
            self.pool.windows.check(reached, (len(it.block_table) for it in sequences))
        self.swap.check(sequence.request_id for sequence in self.scheduler.waiting)
