"""The engine of one worker: schedule, batch, forward, sample, commit.

Synchronous and single-threaded: whoever calls `step` owns it (`worker.thread`).  It serves both
roles: `add` reads prompts, `reserve` and `begin_decode` take over what another worker computed.

An exception of the executor leaves `step`: the state of the device is unknown then, the process
must go.  A request that cannot be served alone fails alone, with an output.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import count

from wire.errors import ErrorCode, LocalProtocolError
from wire.options import Options
from wire.payloads import Load
from worker.batch import BatchConfig, Chunk, build
from worker.blocks import BlockPool
from worker.executor.contract import Executor, SampledToken, Scorer
from worker.scheduler import Plan, Scheduler
from worker.sequence import (
    Computed,
    Failed,
    Output,
    Reserved,
    Sequence,
    Started,
    Status,
    Token,
)


class Engine:
    """Sequences in, outputs out; owns the block pool and drives the executor.

    Attributes:
        cache: The executor's, for packing and unpacking the blocks named in outputs.
        steps: Batches computed so far; moves as long as there is progress.
        announce: When set, called in `step` with `Started`, `Reserved` and `Failed` before the
            batch is computed, so that a transfer can begin meanwhile.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        num_blocks: int,
        block_size: int,
        max_ubatch_tokens: int = 512,
        max_sbatch_sequences: int = 256,
        prefer_pure_decode: bool = False,
        dynamic_batching: bool = True,
        enable_prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = executor.info
        self.cache = executor.allocate(num_blocks, block_size)
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_cache=enable_prefix_cache)
        self.config = BatchConfig(
            max_ubatch_tokens=max_ubatch_tokens,
            max_sbatch_sequences=executor.capabilities.at_most(max_sbatch_sequences),
            prefer_pure_decode=prefer_pure_decode,
            dynamic_batching=dynamic_batching and executor.capabilities.continuous_batching,
        )
        self.scheduler = Scheduler(self.pool, self.config)
        self.announce: Callable[[list[Output]], None] | None = None
        self.steps = 0
        self.num_preemptions = 0
        self._executor = executor
        self._scorer = executor if isinstance(executor, Scorer) else None
        self._clock = clock
        self._arrivals = count()
        self._sequences: dict[int, Sequence] = {}
        self._outputs: list[Output] = []
        self._is_stalled = False

    # What the worker's role asks for.  Outputs come from `step`, failures too.

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt: it is read, then continued here or, with `hand_over`, held.

        An id that is known already is ignored: its first owner gets the end it is owed.
        """
        problem = self._problem(sequence)
        if self._accept(sequence, problem):
            self._set_stop_ids(sequence)

    def reserve(self, request_id: int, token_ids: Many[int]) -> None:
        """Queue for blocks into which the KV of these tokens will be unpacked."""
        sequence = Sequence(request_id, token_ids, status=Status.RESERVING)
        problem = self._problem(sequence, 1)
        self._accept(sequence, problem)

    def begin_decode(
        self,
        request_id: int,
        token_ids: Many[int],
        options: Options,
        max_new_tokens: int | None = None,
    ) -> None:
        """Generate from a reservation whose KV is complete.

        `token_ids` are the reserved tokens and at least one more, the token drawn after them.

        Raises:
            LocalProtocolError: The sequence is known, but is not a reservation that was granted.
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
        try:
            sequence.resume(list(token_ids), options, max_new_tokens)
        except ValueError as error:
            problem: tuple[ErrorCode, str] | None = (ErrorCode.INVALID_REQUEST, str(error))
        else:
            problem = self._problem(sequence)
        if problem is not None:
            self._finish(sequence)
            self._fail(request_id, *problem)
            return
        sequence.started_s = self._clock()
        self._set_stop_ids(sequence)
        self.scheduler.register(sequence)
        self.scheduler.run(sequence)

    def release(self, request_id: int) -> None:
        """End a hand-over: its blocks go back as soon as its first token is there."""
        self._is_stalled = False
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        sequence.is_released = True
        if sequence.status is Status.HANDING_OVER:
            self._finish(sequence)

    def cancel(self, request_id: int) -> None:
        """Drop a sequence in any state and free what it holds; an unknown id is ignored."""
        self._is_stalled = False
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence)

    # The step.

    def step(self) -> list[Output]:
        """Run one iteration over all sequences that can move."""
        plan = self.scheduler.schedule()
        self._tell(plan)
        chunks = plan.chunks
        if chunks:
            batch = build(plan.kind, chunks, self.pool.block_size)
            logits = self._executor.forward(batch)
            tokens = self._executor.sample(logits, batch) if batch.samplings else []
            if batch.scorings and self._scorer is not None:
                batch.keep_scores(self._scorer.score(logits, batch))
            self._commit(chunks, tokens)
            self.steps += 1
        self._is_stalled = not plan.is_progress
        return self._take_outputs()

    def has_work(self) -> bool:
        """Whether `step` could do anything before the engine is asked for something new."""
        if self._outputs or self.scheduler.running:
            return True
        return not self._is_stalled and bool(self.scheduler.waiting or self.scheduler.reserving)

    def _tell(self, plan: Plan) -> None:
        now = self._clock()
        self.num_preemptions += len(plan.preempted)
        for sequence in plan.started:
            sequence.started_s = now
            self._outputs.append(Started(*_allocation(sequence)))
        for sequence in plan.reserved:
            self._outputs.append(Reserved(*_allocation(sequence)))
        for sequence in plan.failed:
            self._sequences.pop(sequence.request_id)
            self._fail(sequence.request_id, *_out_of_blocks(sequence.num_tokens, self.pool))
        if self.announce is not None and self._outputs:
            self.announce(self._take_outputs())

    def _commit(self, chunks: list[Chunk], sampled: list[SampledToken]) -> None:
        drawn = iter(sampled)
        for sequence, num_tokens in chunks:
            sequence.num_computed_tokens += num_tokens
            is_last = sequence.num_computed_tokens == len(sequence.token_ids)
            self.scheduler.register(sequence)
            if sequence.hand_over:
                self._outputs.append(Computed(sequence.request_id, sequence.num_computed_tokens))
            if is_last:
                self._append(sequence, next(drawn))

    def _append(self, sequence: Sequence, token: SampledToken) -> None:
        index = sequence.num_new_tokens
        sequence.token_ids.append(token.token_id)
        reason = sequence.finish_reason(self.info.max_model_len)
        scores = sequence.take_prompt_logprobs()
        self._outputs.append(
            Token(sequence.request_id, token.token_id, index, token.logprobs, reason, scores)
        )
        if sequence.hand_over and not sequence.is_released:
            self.scheduler.hold(sequence)
        elif sequence.hand_over or reason is not None:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        del self._sequences[sequence.request_id]

    def _take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    # Admission.

    def _accept(self, sequence: Sequence, problem: tuple[ErrorCode, str] | None) -> bool:
        self._is_stalled = False
        if sequence.request_id in self._sequences:
            return False
        if problem is not None:
            self._fail(sequence.request_id, *problem)
            return False
        sequence.arrival = next(self._arrivals)
        self._sequences[sequence.request_id] = sequence
        self.scheduler.enqueue(sequence)
        return True

    def _problem(self, sequence: Sequence, extra_tokens: int = 0) -> tuple[ErrorCode, str] | None:
        """Say what makes a sequence impossible for this model or this pool, if anything."""
        problem = sequence.problem(self.info.vocab_size, self.info.max_model_len)
        if problem is None and sequence.scores and self._scorer is None:
            problem = ErrorCode.INVALID_REQUEST, "this model gives no prompt_logprobs"
        if problem is None and not self.scheduler.can_ever_fit(sequence.num_tokens + extra_tokens):
            problem = _out_of_blocks(sequence.num_tokens, self.pool)
        return problem

    def _set_stop_ids(self, sequence: Sequence) -> None:
        options = sequence.options
        eos = frozenset[int]() if options.ignore_eos else self.info.eos_token_ids
        sequence.stop_ids = eos.union(options.stop_token_ids)

    def _fail(self, request_id: int, code: ErrorCode, message: str) -> None:
        self._outputs.append(Failed(request_id, code, message))

    # What others want to know.

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks: running, reserved, or being handed over."""
        return len(self._sequences) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.reserving)

    @property
    def utilization(self) -> float:
        """Running sequences as a share of those that may run, 0 to 1 (seed 002)."""
        return min(1.0, len(self.scheduler.running) / self.scheduler.max_running)

    @property
    def tokens_per_second(self) -> float:
        """The sum of the rates of all running sequences (seed 002)."""
        now = self._clock()
        return sum(sequence.tokens_per_second(now) for sequence in self.scheduler.running)

    def load(self) -> Load:
        """Return a heartbeat's figures; prefix hashes since the last call.  From any thread."""
        stored, evicted = self.pool.journal.read()
        free, cached = self.pool.num_free, self.pool.num_cached
        return Load(
            total=self.pool.num_blocks,
            used=max(0, self.pool.num_blocks - free - cached),
            cached=cached,
            free=free,
            preemptions=self.num_preemptions,
            stored=stored,
            evicted=evicted,
        )

    def check(self) -> None:
        """Assert that every block is accounted for; call it when idle, or after any step."""
        self.pool.check(sequence.block_table.snapshot() for sequence in self._sequences.values())


def _allocation(sequence: Sequence) -> tuple[int, tuple[int, ...], int]:
    return sequence.request_id, sequence.block_table.snapshot(), sequence.num_cached_tokens


def _out_of_blocks(num_tokens: int, pool: BlockPool) -> tuple[ErrorCode, str]:
    room = f"{pool.num_blocks} blocks of {pool.block_size} tokens"
    return ErrorCode.OUT_OF_BLOCKS, f"{num_tokens} tokens do not fit this worker's {room}"
