"""Measure the engine's overhead per step: schedule, batch and commit, without a model.

The executor computes nothing, so the engine accounts for all of the time.  CPU time of the thread
is measured, so that waiting for a core is not included.  But other load on shared caches can double
the time for seconds, so all cases are measured in several rounds, and the best round of each
counts.  Prints the median and p99 in milliseconds per step for pure decode, decode under memory
pressure, mixed steps and steps with drafts.  Exits with 1 if a median is over its limit.

    python scripts/bench_overhead.py --steps 300 --rounds 3
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.command.bench.table import Table
from wire.layout import KVLayout
from wire.options import Options
from worker.engine.engine import Engine
from worker.engine.sequence import Sequence
from worker.executor.batch import Batch
from worker.executor.contract import Capabilities, MemoryRequirements, ModelInfo, SampledToken
from worker.executor.hash import HashKVCache

LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=8, dtype="uint8")
LIMITS_MS = {32: 0.5, 256: 3.0}


class NullExecutor:
    """An executor that returns prepared tokens; its own time is measured and subtracted."""

    def __init__(self) -> None:
        self.info = ModelInfo("null", "null", 32_000, 1 << 20, frozenset({2}), LAYOUT)
        memory = MemoryRequirements(0, 0, LAYOUT.token_bytes)
        self.capabilities = Capabilities(memory=memory, speculative=True)
        self.elapsed_s = 0.0
        drawn = np.random.default_rng(0).integers(3, 32_000, 4096).tolist()
        self._drawn = [SampledToken(token_id) for token_id in drawn]

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> HashKVCache:
        return HashKVCache(num_blocks, block_size)

    def forward(self, batch: Batch) -> None:
        """Compute nothing."""

    def sample(self, logits: None, batch: Batch) -> list[SampledToken]:
        start_s = time.thread_time()
        num_rows = len(batch.sample_rows)
        start = num_rows * 7 % 1024
        tokens = self._drawn[start : start + num_rows]
        self.elapsed_s += time.thread_time() - start_s
        return tokens

    def shutdown(self) -> None:
        """Release nothing."""


@dataclass(frozen=True)
class Case:
    """One measured case: a row of the table."""

    name: str
    num_sequences: int
    context: int = 512
    blocks_share: float = 4.0  # relative to what all sequences need at the start
    arrivals: float = 0.0  # new prompts per step
    speculate: str | None = None


CASES = [
    Case("decode", 32),
    Case("decode", 256),
    Case("decode, 4096 tokens of context", 256, context=4096, blocks_share=1.5),
    Case("decode, preempting", 256, blocks_share=1.05),
    Case("mixed, a prompt a step", 32, arrivals=1.0),
    Case("mixed, a prompt a step", 256, arrivals=1.0),
    Case("decode, n-gram drafts", 32, speculate="ngram:4"),
    Case("decode, n-gram drafts", 256, speculate="ngram:4"),
]


def measure(case: Case, steps: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the time of each step without the executor, in milliseconds."""
    executor = NullExecutor()
    blocks = int(case.num_sequences * (case.context // 16 + 1) * case.blocks_share)
    engine = Engine(
        executor,
        num_blocks=blocks,
        block_size=16,
        max_ubatch_tokens=2048,
        speculate=case.speculate,
    )
    draw = np.random.default_rng(1)
    options = Options(ignore_eos=True, timeline=True)

    def arrive(request_id: int, num_tokens: int, limit: int) -> None:
        prompt = draw.integers(3, 32_000, num_tokens).tolist()
        engine.add(Sequence(request_id, prompt, options, limit))

    for request_id in range(case.num_sequences):
        arrive(request_id, case.context, steps * 100)
    while engine.counters.prefill_tokens < case.num_sequences * case.context:
        engine.step()
    elapsed_ms = []
    due = 0.0
    for step in range(steps):
        due += case.arrivals
        while due >= 1:
            due -= 1
            arrive(1_000_000 + step, 256, 8)
        before_s, executor.elapsed_s = time.thread_time(), 0.0
        engine.step()
        elapsed_ms.append(1000 * (time.thread_time() - before_s - executor.elapsed_s))
    engine.check()
    return np.array(elapsed_ms)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="measured in each case and round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    failed = False
    table = Table(
        *("case:<34", "sequences:>9", "median ms:>10.3f", "p99 ms:>8.3f", "limit ms:>9.1f")
    )
    rounds = [[measure(case, args.steps) for case in CASES] for _ in range(args.rounds)]
    for case, measured in zip(CASES, zip(*rounds, strict=True), strict=True):
        median, p99 = min((np.median(each), np.percentile(each, 99)) for each in measured)
        limit = LIMITS_MS[case.num_sequences]
        failed |= bool(median > limit)
        table.row(case.name, case.num_sequences, float(median), float(p99), limit)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
