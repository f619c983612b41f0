"""What long prompts cost those who generate beside them, where one engine does both.

    python scripts/bench_shared.py --model DIR --streams 16 --long-every-s 2

Each stream is a prompt of 64 tokens and 96 tokens out, and then the next; without long prompts
first, then with one of 1024 tokens every so often.  What `scripts/bench_serve.py --long-every-s`
measures with a worker for each, but without a network.  A text without all its tokens ends the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_engine import draw
from wire.options import Options
from worker.engine.engine import Engine
from worker.engine.outputs import Failed, Token
from worker.engine.sequence import Sequence
from worker.executor.torch import TorchExecutor

PROMPT, OUTPUT, LONG = 64, 96, 1024


def measure(engine: Engine, streams: int, texts: int, long_every_s: float) -> dict[str, float]:
    """Generate so many texts; return milliseconds between tokens and to the first ones.

    Raises:
        SystemExit: A text ended early.
    """
    vocab_size = engine.info.vocab_size
    prompts = iter(draw(texts, PROMPT, vocab_size))
    longs = itertools.cycle(draw(16, LONG, vocab_size))
    ids = itertools.count(time.monotonic_ns())
    begun: dict[int, float] = {}  # by id, those whose first token is awaited
    last: dict[int, float] = {}
    counts: dict[int, int] = {}
    is_long: set[int] = set()
    gaps: list[float] = []
    firsts: list[float] = []
    long_firsts: list[float] = []

    def add(prompt: list[int], count: int) -> int:
        request_id = next(ids)
        options = Options(temperature=0, ignore_eos=True)
        engine.add(Sequence(request_id, prompt, options, max_new_tokens=count))
        begun[request_id] = time.perf_counter()
        return request_id

    for prompt in itertools.islice(prompts, streams):
        add(prompt, OUTPUT)
    next_long = time.perf_counter() + long_every_s
    while engine.has_work():
        if long_every_s and time.perf_counter() >= next_long:
            is_long.add(add(next(longs), 1))
            next_long += long_every_s
        for output in engine.step():
            if isinstance(output, Failed):
                raise SystemExit(f"a text failed: {output.message}")
            if not isinstance(output, Token):
                continue
            it, now = output.request_id, time.perf_counter()
            if it in begun:
                (long_firsts if it in is_long else firsts).append(now - begun.pop(it))
            else:
                gaps.append(now - last[it])
            last[it], counts[it] = now, counts.get(it, 0) + 1
            if output.finish_reason and it not in is_long:
                if counts[it] != OUTPUT:
                    raise SystemExit(f"a text has {counts[it]} tokens, not {OUTPUT}")
                for prompt in itertools.islice(prompts, 1):
                    add(prompt, OUTPUT)
    at = statistics.quantiles(gaps, n=100)
    found = {"itl_p50": at[49], "itl_p99": at[98], "ttft_p50": statistics.median(firsts)}
    if long_firsts:
        found["long_ttft_p50"] = statistics.median(long_firsts)
    return {name: round(1000 * seconds, 1) for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a model directory")
    parser.add_argument("--streams", type=int, default=16, help="texts at a time")
    parser.add_argument("--texts", type=int, default=64, help="texts in all")
    parser.add_argument("--long-every-s", type=float, default=2.0, help="seconds between prompts")
    args = parser.parse_args()
    executor = TorchExecutor.load(args.model, name="bench", device="cpu")
    engine = Engine(executor, num_blocks=1024, block_size=16, prefix_cache=False)
    measure(engine, args.streams, args.streams, 0)  # loops are compiled, programs written
    for every_s in (0.0, args.long_every_s):
        print(
            json.dumps(
                {"long_every_s": every_s} | measure(engine, args.streams, args.texts, every_s)
            )
        )


if __name__ == "__main__":
    main()
