"""Measure tensor and pipeline parallelism on this machine, compared with a single process.

    python scripts/bench_parallel.py --model DIR    # a checkpoint created by make_model --like
    python scripts/bench_parallel.py --model DIR --grids 1x1 2x1 1x2 --rows 1 8 --tokens 512

For each grid (shards x stages), starts the executor of a worker with its other processes, and times
steps: decode of several rows after prompts of 256 tokens, and prefill of chunks.  Before that, all
grids must generate the same tokens in float32.  `waits` is the fraction of a step that the leader
spends in all-reduces over shards and in waiting for the previous stage.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.command.bench.table import Table

CONTEXT = 256


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--grids", nargs="+", default=["1x1", "2x1", "1x2"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args)))
        return 0
    chosen = [
        run(grid, [*sys.argv[1:], "--dtype", "float32", "--rounds", "1"]) for grid in args.grids
    ]
    if any(it["tokens"] != chosen[0]["tokens"] for it in chosen):
        print("the grids do not choose the same tokens")
        return 1
    print(f"{args.grids} choose the same tokens in float32; {args.threads} threads a process")
    table = Table("grid:<6", "step:<14", "ms:>8.1f", "waits:>6.0%")
    for grid in args.grids:
        found = run(grid, sys.argv[1:])
        for name, (seconds, waits) in found["times"].items():
            table.row(grid, name, 1000 * seconds, waits)
    return 0


def run(grid: str, argv: list[str]) -> dict[str, Any]:
    """Measure one grid in a new process."""
    command = [sys.executable, __file__, *argv, "--one", grid]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the first generated tokens, and for each step its seconds and fraction of waits."""
    from worker.config import Config
    from worker.engine.instrumented import Direct
    from worker.processes import join_processes
    from worker.start import load

    shards, stages = map(int, args.one.split("x"))
    config = Config(
        role="decode",
        model=args.model,
        dtype=args.dtype,
        device="cpu",
        threads=args.threads,
        tensor_parallel=shards,
        pipeline_parallel=stages,
        log_level="warning",
    )
    ranks = join_processes(config, os._exit)
    waits = Waits()
    if ranks is not None:
        for name in ("all_reduce", "receive", "gather"):
            setattr(ranks, name, waits.timed(getattr(ranks, name)))
    executor = load(config, ranks)
    most = max(args.rows)
    cache = executor.allocate(most * (CONTEXT // 16 + 8) + max(args.tokens) // 16 + 8, 16)
    direct, draw = Direct(executor, cache), random.Random(0)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(3, executor.info.vocab_size - 1) for _ in range(length)]

    times = {}
    texts = [direct.prefill(prompt(CONTEXT)) for _ in range(most)]
    for rows in args.rows:
        times[f"{rows} rows"] = waits.median(
            partial(direct.batch_decode, texts[:rows]), args.rounds
        )
    tokens = [text.token_ids[CONTEXT:] for text in texts]
    for text in texts:
        direct.release_cache(text)
    for length in args.tokens:

        def read(length: int = length) -> None:
            direct.release_cache(direct.prefill(prompt(length)))

        times[f"{length} tokens"] = waits.median(read, args.rounds)
    executor.shutdown()
    return {"tokens": tokens, "times": times}


class Waits:
    """Counts the time that the leader waits for other processes."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time is counted."""

        def counted(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            self._seconds += time.perf_counter() - start
            return result

        return counted

    def median(self, step: Callable[[], Any], rounds: int) -> tuple[float, float]:
        """Return the median time of a step in seconds, and the fraction of waits in all steps."""
        step()
        self._seconds, took = 0.0, []
        for _ in range(rounds):
            start = time.perf_counter()
            step()
            took.append(time.perf_counter() - start)
        return statistics.median(took), self._seconds / sum(took)


if __name__ == "__main__":
    sys.exit(main())
