"""Any executor, with what seed 003 wants around it: status, metrics and a warmup.

A step is `forward` and, if anything is sampled, the `sample` after it; one that a sequence fails is
logged and not counted.  The engine calls from its thread; `status` and `metrics` may be asked from
any.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import structlog

from wire.options import Options
from worker.engine.direct import Direct
from worker.executor.batch import Batch, BatchType
from worker.executor.contract import Executor, KVCache, SampledToken, Scorer, SequenceFailed
from worker.executor.metrics import Metrics, Stopwatch

log = structlog.get_logger("worker")


class State(StrEnum):
    """Where an executor is in its life."""

    INITIALIZING = "initializing"  # until `allocate`
    READY = "ready"
    BUSY = "busy"  # a step is under way
    ERROR = "error"  # a step raised; the process is expected to end
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes: what this executor allocated, and the most this process ever had in memory."""

    parameter_bytes: int
    kv_cache_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """How an executor is now.  `last_step_s` is on the clock it was given; None before any step."""

    state: State
    batch_sequences: int
    memory: MemoryUsage
    last_step_s: float | None


class MeasuredExecutor:
    """An executor that knows how it is; implements `worker.executor.contract.Executor`."""

    def __init__(self, executor: Executor, *, clock: Callable[[], float] = time.perf_counter):
        self.info = executor.info
        self.capabilities = executor.capabilities
        self._executor = executor
        self._clock = clock
        self._cache: KVCache | None = None
        self._state = State.INITIALIZING
        self._batch_sequences = 0
        self._started_s = 0.0
        self._last_step_s: float | None = None
        self._prefill, self._decode = Stopwatch(), Stopwatch()
        self._num_sampled = 0
        self._num_sequences = 0

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        self._cache = self._executor.allocate(num_blocks, block_size)
        self._state = State.READY
        return self._cache

    def warmup(self) -> None:
        """Read a prompt and generate, so that no request pays for what is done only once.

        What a plug-in does wrong shows here, before the first request.  For the time between
        `allocate` and the first sequence: it writes to blocks.  It is not counted.
        """
        assert self._cache is not None, "allocate comes first"
        room = min(self._cache.num_blocks * self._cache.block_size, self.info.max_model_len)
        direct = Direct(self._executor, self._cache)
        # Tokens are drawn: there is more to compile for that than for the likeliest.
        sequence = direct.prefill([0] * min(2, room), Options(temperature=1.0))
        if room > 2:
            direct.decode(sequence)
        direct.release_cache(sequence)

    def forward(self, batch: Batch) -> Any:
        self._state, self._batch_sequences = State.BUSY, len(batch.context_lens)
        self._started_s = self._clock()
        logits = self._watched(self._executor.forward, batch)
        if not batch.samplings:
            self._finish(batch)
        return logits

    def sample(self, logits: Any, batch: Batch) -> list[SampledToken]:
        tokens: list[SampledToken] = self._watched(self._executor.sample, logits, batch)
        self._finish(batch)
        return tokens

    def shutdown(self) -> None:
        self._executor.shutdown()
        self._cache = None
        self._state = State.SHUTDOWN

    def status(self) -> ExecutorStatus:
        cache = self._cache
        parameter_bytes = self.capabilities.memory.parameter_bytes
        kv_cache_bytes = 0
        if cache is not None:
            kv_cache_bytes = cache.num_blocks * cache.block_size * cache.layout.token_bytes
        memory = MemoryUsage(parameter_bytes, kv_cache_bytes, _peak_bytes())
        return ExecutorStatus(self._state, self._batch_sequences, memory, self._last_step_s)

    def metrics(self) -> Metrics:
        total_s = self._prefill.total_s + self._decode.total_s
        num_steps = self._prefill.num_steps + self._decode.num_steps
        return Metrics(
            prefill=self._prefill.latency(),
            decode=self._decode.latency(),
            tokens_per_second=self._num_sampled / total_s if total_s else 0.0,
            mean_batch_sequences=self._num_sequences / num_steps if num_steps else 0.0,
        )

    def _watched(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except SequenceFailed as failure:  # nothing is wrong but with that sequence
            self._state, self._batch_sequences = State.READY, 0
            log.warning("a sequence cannot be computed", exc_info=failure)
            raise
        except BaseException:
            self._state = State.ERROR
            raise

    def _finish(self, batch: Batch) -> None:
        self._last_step_s = self._clock()
        stopwatch = self._decode if batch.kind is BatchType.DECODE else self._prefill
        stopwatch.add(self._last_step_s - self._started_s)
        self._num_sampled += len(batch.sample_rows)
        self._num_sequences += self._batch_sequences
        self._state, self._batch_sequences = State.READY, 0


class MeasuredScorer(MeasuredExecutor):
    """The same around an executor that is a `worker.executor.contract.Scorer` too."""

    def __init__(self, executor: Executor, scorer: Scorer) -> None:
        super().__init__(executor)
        self.score = scorer.score


def measured(executor: Executor) -> MeasuredExecutor:
    """Return the executor with measurements around it; one that has them is returned as it is."""
    if isinstance(executor, MeasuredExecutor):
        return executor
    if isinstance(executor, Scorer):
        return MeasuredScorer(executor, executor)
    return MeasuredExecutor(executor)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
