#!/usr/bin/env python3
"""Compare policies of placement on traces, over a model of workers.

    scripts/bench_placement.py ../shared/traces/conversation_trace.jsonl
    scripts/bench_placement.py agents

A trace is a file of lines of JSON with `timestamp` (ms), `input_length`, `output_length` and
`hash_ids` (one for each block of 512 tokens of the prompt), or `agents`: sessions that grow turn by
turn, as those of coding agents do.  Baton's policy is the router's own code; the rest of a cluster
is `bench/placement_model.py`.  `ideal` is the share of prompt tokens that one cache without limits
would hold.  `load` is the busiest worker over the mean, of prefill and of decode workers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.command.bench.table import Table
from router.core.fleet import Fleet, Worker
from router.core.placement import Placement
from router.core.policy import Choice, Prompt
from router.core.prefixes import PrefixIndex
from router.core.state import Limits, RequestState
from scripts.bench.placement_model import Arrival, Model, Served, Shape
from wire.frames import Role
from wire.prefix import prefix_hashes

TRACE_BLOCK: Final = 512
NUM_TURNS: Final = 20


class Blind(Placement, ABC):
    """A policy that does not know what workers have cached."""

    @abstractmethod
    def pick(self, workers: list[Worker]) -> Worker:
        """Return one of these workers, which have capacity."""

    def _choose(
        self, prefills: list[Worker], decodes: list[Worker], prompt: Prompt
    ) -> Choice | None:
        return Choice(self.pick(prefills), self.pick(decodes))

    def _prompt(self, state: RequestState, now: float) -> Prompt:
        return Prompt(now=now, num_tokens=state.seq_len, held={})


class Random(Blind):
    """Any worker."""

    _random = random.Random(0)

    def pick(self, workers: list[Worker]) -> Worker:
        return self._random.choice(workers)


class RoundRobin(Blind):
    """Workers in turn."""

    _turns = count()

    def pick(self, workers: list[Worker]) -> Worker:
        return workers[next(self._turns) // 2 % len(workers)]


class LeastLoaded(Blind):
    """The worker with the fewest tokens to prefill, then the fewest requests."""

    def pick(self, workers: list[Worker]) -> Worker:
        return min(workers, key=lambda it: (it.prefill_tokens, it.num_active))


POLICIES: Final[dict[str, type[Placement]]] = {
    "random": Random,
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "baton": Placement,
}


def read_trace(path: Path) -> list[Arrival]:
    """Return the requests of a trace; equal hash ids become equal tokens."""
    arrivals = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        tokens = [token for block in row["hash_ids"] for token in (block,) * TRACE_BLOCK]
        answer = (0,) * max(2, row["output_length"])
        prompt = tuple(tokens[: row["input_length"]])
        arrivals.append(Arrival(row["timestamp"] / 1000, prompt, answer))
    return arrivals


def agents(num_sessions: int, seconds: float, seed: int = 1) -> list[Arrival]:
    """Return the first turns of sessions; each following turn comes after a pause for tools."""
    draw = random.Random(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple([draw.randrange(100_000) for _ in range(draw.randint(low, high))])

    systems = [tokens(2000, 8000) for _ in range(4)]

    def turn(at_s: float, context: tuple[int, ...], number: int) -> Arrival:
        prompt, answer = context + tokens(100, 1500), tokens(50, 400)

        def on_end(now: float) -> Arrival | None:
            if number == NUM_TURNS:
                return None
            return turn(now + draw.expovariate(1 / 8), prompt + answer, number + 1)

        return Arrival(at_s, prompt, answer, on_end)

    return [turn(draw.uniform(0, seconds), draw.choice(systems), 1) for _ in range(num_sessions)]


def ideal(served: Sequence[Served], block_size: int) -> float:
    """Return the share of prompt tokens that a cache without limits holds, answers too."""
    known: set[int] = set()
    num_cached = num_tokens = 0
    for _, is_end, prompt, answer in sorted(_moments(served), key=lambda it: it[:2]):
        hashes = prefix_hashes(prompt + answer[:-1], block_size)
        if not is_end:
            held = next((i for i, value in enumerate(hashes) if value not in known), len(hashes))
            num_cached += min(held * block_size, len(prompt) - 1)
            num_tokens += len(prompt)
        known.update(hashes)
    return num_cached / num_tokens


def _moments(
    served: Sequence[Served],
) -> Iterator[tuple[float, bool, tuple[int, ...], tuple[int, ...]]]:
    """Yield when a prompt comes, and when its answer is known."""
    for each in served:
        yield each.arrival.at_s, False, each.arrival.token_ids, ()
        yield each.end_s, True, each.arrival.token_ids, each.arrival.answer


def measure(
    shape: Shape, policy: type[Placement], make: Callable[[], list[Arrival]]
) -> tuple[Model, list[str | float]]:
    """Run a policy; return its model, and the cells of its row after the ideal's."""

    def make_placement(fleet: Fleet, index: PrefixIndex, limits: Limits) -> Placement:
        return policy(fleet, index, limits=limits, request_ids=count(1))

    model = Model(shape, make_placement)
    model.run(make())
    num_tokens = sum(len(each.arrival.token_ids) for each in model.served)
    ttft = np.quantile([each.ttft_s for each in model.served], (0.5, 0.9, 0.99))
    loads = [
        max(busy) / np.mean(busy)
        for busy in ([it.busy_s for it in model.of_role(role)] for role in Role if role < 3)
        if busy
    ]
    return model, [
        sum(each.num_cached for each in model.served) / num_tokens,
        sum(each.num_sent for each in model.served) / 1e9,
        *ttft,
        *loads,
        1e6 * float(np.median(model.decision_s)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", help="a file, or `agents`")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--tokens-per-s", type=float, default=5000.0, help="of a prefill worker")
    parser.add_argument("--cache-tokens", type=int, default=4_000_000, help="of a worker")
    parser.add_argument("--sessions", type=int, default=400, help="of `agents`")
    parser.add_argument("--policy", nargs="*", choices=POLICIES)
    args = parser.parse_args()
    shape = Shape(args.prefill, args.decode, args.cache_tokens, TRACE_BLOCK, args.tokens_per_s)
    if args.trace == "agents":
        shape, make = replace(shape, block_size=16), partial(agents, args.sessions, 600.0)
    else:
        make = partial(read_trace, Path(args.trace))
    table = Table(
        "policy:<13",
        "hits:>6.3f",
        "of ideal:>8.3f",
        "sent GB:>8.0f",
        "TTFT p50:>8.2f",
        "p90:>7.2f",
        "p99:>7.2f",
        "load P:>6.2f",
        "load D:>6.2f",
        "us:>6.0f",
    )
    for name, policy in POLICIES.items():
        if args.policy and name not in args.policy:
            continue
        model, (hits, *cells) = measure(shape, policy, make)
        assert isinstance(hits, float)
        table.row(name, hits, hits / ideal(model.served, shape.block_size), *cells)


if __name__ == "__main__":
    main()
