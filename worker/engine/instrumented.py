"""Adds status, metrics and a warmup to any executor; `Direct` runs one without an engine."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

import structlog

from wire.errors import ErrorCode
from wire.options import Options
from wire.process.log_limit import RepeatedLine
from worker.compute.contract import KVCache
from worker.engine.batch import Chunk, build
from worker.engine.blocks import BlockPool
from worker.engine.sequence import Sequence, Status
from worker.engine.states import states_of
from worker.engine.windows import windows_of
from worker.executor.batch import Batch, BatchType
from worker.executor.contract import (
    Drawer,
    Drawn,
    Executor,
    Preparer,
    SampledToken,
    Scorer,
    SequenceFailed,
    Structurer,
)

log = structlog.get_logger("worker")

# Percentiles cover this many of the latest steps: enough for a p95, and quick to sort.
WINDOW: Final = 1024


@dataclass(frozen=True, slots=True)
class Latency:
    """How long steps of one kind take; the percentiles cover the latest `WINDOW` steps."""

    num_steps: int
    mean_s: float
    p50_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """Totals since the executor was created.

    Attributes:
        prefill: Steps that prefill prompts, whether or not they also decode.
        decode: Steps that only decode.
        tokens_per_second: Sampled tokens divided by the total duration of all steps.
        mean_batch_sequences: The mean number of sequences in a step.
    """

    prefill: Latency
    decode: Latency
    tokens_per_second: float
    mean_batch_sequences: float

    @property
    def num_steps(self) -> int:
        return self.prefill.num_steps + self.decode.num_steps


class Stopwatch:
    """Durations of steps of one kind; one thread writes, any thread reads."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.total_s = 0.0
        self._latest = deque[float](maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        self._latest.append(seconds)
        self.total_s += seconds
        self.num_steps += 1

    def latency(self) -> Latency:
        latest = sorted(self._latest.copy())
        mean_s = self.total_s / self.num_steps if self.num_steps else 0.0
        return Latency(self.num_steps, mean_s, _percentile(latest, 50), _percentile(latest, 95))


class State(StrEnum):
    """The life cycle of an executor."""

    INITIALIZING = "initializing"  # until `allocate`
    READY = "ready"
    BUSY = "busy"  # a step is running
    ERROR = "error"  # a step raised; the process is expected to end
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """The size of the weights and of the KV cache, and the peak memory of this process."""

    parameter_bytes: int
    kv_cache_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """A snapshot of an executor; `last_step_s` is the time when its last step ended, if any."""

    state: State
    batch_sequences: int
    memory: MemoryUsage
    last_step_s: float | None


class MeasuredExecutor:
    """Wraps an executor to count and time its steps; implements `Executor` itself.

    A step is a `forward` and, if the batch has rows to sample, the `sample` after it.  A step that
    fails with `SequenceFailed` is logged but not counted.  Any thread may call `status`, `metrics`.
    """

    def __init__(self, executor: Executor, *, clock: Callable[[], float] = time.perf_counter):
        self.info = executor.info
        self.capabilities = executor.capabilities
        self._executor = executor
        self._clock = clock
        self._cache: KVCache | None = None
        self._state = State.INITIALIZING
        self._batch_sequences = 0
        self._batch: Batch | None = None  # the last batch that was started
        self._started_s = 0.0
        self._last_step_s: float | None = None
        self._prefill, self._decode = Stopwatch(), Stopwatch()
        self._num_sampled = 0
        self._num_sequences = 0
        self._is_bad_token_logged = False
        self._faults = RepeatedLine(log.warning, "a sequence cannot be computed", clock)
        # Optional capabilities pass through.
        if isinstance(executor, Scorer):
            self.score = executor.score
        if isinstance(executor, Structurer):
            self.structured = executor.structured
        if isinstance(executor, Drawer):
            self.can_draw, self.draw = executor.can_draw, self._draw

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> KVCache:
        sizes = {"num_states": num_states, "num_window_blocks": num_window_blocks}
        nonzero = {name: number for name, number in sizes.items() if number}
        self._cache = self._executor.allocate(num_blocks, block_size, **nonzero)
        self._state = State.READY
        return self._cache

    def warmup(self) -> None:
        """Prefill a prompt and decode a token, so that no request waits for compilation.

        A broken plug-in fails here.  The warmup overwrites blocks, so it has to run before the
        first sequence.  Its steps are not counted.
        """
        assert self._cache is not None, "allocate comes first"
        capacity = min(self._cache.num_blocks * self._cache.block_size, self.info.max_model_len)
        direct = Direct(self._executor, self._cache)
        num_tokens = self._executor.prepare() if isinstance(self._executor, Preparer) else 2
        # With a temperature, because random sampling compiles more code than greedy sampling.
        sequence = direct.prefill([0] * min(num_tokens, capacity), Options(temperature=1.0))
        if capacity > num_tokens:
            direct.decode(sequence)
        direct.release_cache(sequence)

    def forward(self, batch: Batch) -> Any:
        self._state, self._batch_sequences = State.BUSY, len(batch.context_lens)
        self._batch, self._started_s = batch, self._clock()
        self._faults.tick()
        logits = self._watched("forward", batch, self._executor.forward, batch)
        if not batch.samplings:
            self._finish(batch, self._started_s)
        return logits

    def sample(self, logits: Any, batch: Batch) -> list[SampledToken]:
        started_s = self._started_s
        return self._sampled(batch, started_s, "sample", self._executor.sample, logits, batch)

    def _draw(self, logits: Any, batch: Batch) -> Drawn:
        drawer = self._executor
        assert isinstance(drawer, Drawer)
        drawn: Drawn = self._watched("draw", batch, drawer.draw, logits, batch)
        return partial(self._sampled, batch, self._started_s, "draw", drawn)

    def _sampled(
        self, batch: Batch, started_s: float, method: str, call: Callable[..., Any], *args: Any
    ) -> list[SampledToken]:
        """Return the tokens that `call` samples, and count the step."""
        tokens: list[SampledToken] = self._watched(method, batch, call, *args)
        self._finish(batch, started_s)
        if not self._is_bad_token_logged:
            highest, vocab_size = max([it.token_id for it in tokens]), self.info.vocab_size
            if highest >= vocab_size:
                self._is_bad_token_logged = True
                event = "the executor drew a token that is not below its vocab_size"
                log.error(event, token=highest, vocab_size=vocab_size)
        return tokens

    def shutdown(self) -> None:
        self._executor.shutdown()
        self._cache = None
        self._state = State.SHUTDOWN

    def status(self) -> ExecutorStatus:
        cache, memory = self._cache, self.capabilities.memory
        kv_cache_bytes = 0
        if cache is not None:
            block_bytes = cache.num_blocks * memory.kv_bytes_per_token
            if cache.layout.windows:
                block_bytes += cache.window_blocks.num_blocks * memory.window_bytes_per_token
            kv_cache_bytes = block_bytes * cache.block_size
            if cache.layout.has_state:
                kv_cache_bytes += cache.state_slots.num_slots * cache.layout.state_bytes
        return ExecutorStatus(
            self._state,
            self._batch_sequences,
            MemoryUsage(memory.parameter_bytes, kv_cache_bytes, _peak_bytes()),
            self._last_step_s,
        )

    def metrics(self) -> Metrics:
        total_s = self._prefill.total_s + self._decode.total_s
        num_steps = self._prefill.num_steps + self._decode.num_steps
        return Metrics(
            prefill=self._prefill.latency(),
            decode=self._decode.latency(),
            tokens_per_second=self._num_sampled / total_s if total_s else 0.0,
            mean_batch_sequences=self._num_sequences / num_steps if num_steps else 0.0,
        )

    def _watched(self, method: str, batch: Batch, call: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the executor; if it raises, update `status` and raise again."""
        try:
            return call(*args)
        except SequenceFailed as failure:  # only that sequence is affected
            self._state, self._batch_sequences = State.READY, 0
            if failure.code is ErrorCode.MODEL_FAILED:  # otherwise the request is at fault
                fault = type(failure.__cause__ or failure).__name__
                self._faults.add({"fault": fault}, exc_info=failure)
            raise
        except BaseException as error:
            self._state = State.ERROR
            kind, size = batch.kind, len(batch.context_lens)
            error.add_note(f"in {method} of a {kind} step, batch size {size}")
            raise

    def _finish(self, batch: Batch, started_s: float) -> None:
        # A step that was started during another one has computed only since that one ended.
        started_s = max(started_s, self._last_step_s or started_s)
        self._last_step_s = self._clock()
        stopwatch = self._decode if batch.kind is BatchType.DECODE else self._prefill
        stopwatch.add(self._last_step_s - started_s)
        self._num_sampled += len(batch.sample_rows)
        self._num_sequences += len(batch.context_lens)
        if batch is self._batch:
            self._state, self._batch_sequences = State.READY, 0


class Direct:
    """Prefills and decodes without an engine, one step per call, for the warmup and for tests.

    `cache` is the result of the executor's `allocate`; no engine may use it at the same time.
    """

    def __init__(self, executor: Executor, cache: KVCache) -> None:
        self._executor = executor
        self._pool = BlockPool(
            cache.num_blocks,
            cache.block_size,
            enable_prefix_cache=False,
            windows=windows_of(cache, step_tokens=0),
            states=states_of(cache),
        )

    def prefill(self, token_ids: Many[int], options: Options | None = None) -> Sequence:
        """Prefill a prompt; return its sequence, with the first token appended."""
        (sequence,) = self.batch_prefill([token_ids], options)
        return sequence

    def batch_prefill(
        self, prompts: Many[Many[int]], options: Options | None = None
    ) -> list[Sequence]:
        """Prefill several prompts in one step.

        Raises:
            ValueError: There are not enough blocks.
        """
        sequences = [Sequence(index, prompt, options) for index, prompt in enumerate(prompts)]
        self._step(BatchType.PREFILL, sequences)
        return sequences

    def decode(self, sequence: Sequence) -> SampledToken:
        """Decode, append and return the next token of a sequence."""
        (token,) = self.batch_decode([sequence])
        return token

    def batch_decode(self, sequences: Many[Sequence]) -> list[SampledToken]:
        """Decode one token of each sequence in one step; raises as `batch_prefill` does."""
        return self._step(BatchType.DECODE, sequences)

    def release_cache(self, sequence: Sequence) -> None:
        """End a sequence and free its blocks."""
        sequence.give_back(self._pool)
        if self._pool.states is not None:
            self._pool.states.prepare((), 0)
        sequence.move_to(Status.FINISHED)

    def _step(self, kind: BatchType, sequences: Many[Sequence]) -> list[SampledToken]:
        self._allocate(sequences)
        chunks = [Chunk(sequence, sequence.num_uncomputed_tokens) for sequence in sequences]
        for chunk in chunks:
            chunk.sequence.look_ahead(chunk.num_tokens, self._pool)
        batch = build(kind, chunks, self._pool.block_size)
        tokens = self._executor.sample(self._executor.forward(batch), batch)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.look_ahead(0, self._pool)
            sequence.token_ids.append(token.token_id)
        return tokens

    def _allocate(self, sequences: Many[Sequence]) -> None:
        wanted = [
            self._pool.blocks_for(sequence.num_tokens) - len(sequence.block_table)
            for sequence in sequences
        ]
        windows, num_free = self._pool.windows, self._pool.num_free
        if windows is not None:
            num_free = min(num_free, windows.num_free)
        if sum(wanted) > num_free:
            raise ValueError(f"{sum(wanted)} more blocks are too many, {num_free} left")
        for sequence, num_blocks in zip(sequences, wanted, strict=True):
            if num_blocks:
                sequence.take(num_blocks, self._pool)


def measured(executor: Executor) -> MeasuredExecutor:
    """Wrap an executor in a `MeasuredExecutor`, unless it is one."""
    return executor if isinstance(executor, MeasuredExecutor) else MeasuredExecutor(executor)


def _percentile(ordered: list[float], percent: int) -> float:
    """Return the nearest-rank percentile of ascending values; 0 for an empty list."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else 0.0


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
