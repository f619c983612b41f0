#!/usr/bin/env python
"""Runs whole clusters on virtual time, one a seed, and checks what the design promises.

    scripts/simulate --seeds 500            seeds 0 to 499; exit status 1 if one fails
    scripts/simulate --seed 17 --trace      one seed again, event by event
    scripts/simulate --planted              each planted bug on a seed that is known to catch it
    scripts/simulate --hunt                 each on all seeds, until one catches it

Seeds run in as many processes as there are cores.  The routers' cores and the workers are the real
ones; see `tests/simulation`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.bugs import BUGS, BrokenPlant, hunt, planted
from tests.simulation.seeds import Outcome, quiet, run_seed


def main() -> int:
    args = _parse()
    if args.planted:
        return _all_caught({name: [bug.seed] for name, bug in BUGS.items()})
    seeds = range(args.first, args.first + args.seeds)
    if args.hunt:
        return _all_caught(dict.fromkeys(BUGS, seeds))
    return _run([args.seed] if args.seed is not None else seeds, args.plant, args.trace)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--seeds", type=int, default=500, help="how many (500)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--trace", action="store_true", help="print every event of a failed seed")
    parser.add_argument("--plant", choices=sorted(BUGS), help="run with this bug")
    parser.add_argument("--planted", action="store_true", help="the seeds that catch planted bugs")
    parser.add_argument("--hunt", action="store_true", help="find such seeds")
    return parser.parse_args()


def _run(seeds: Iterable[int], bug: str | None, is_traced: bool) -> int:
    started, failed, ends = time.perf_counter(), list[Outcome](), Counter[str]()
    num_events = num_seeds = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        run = partial(_run_one, bug=bug, is_traced=is_traced)
        for outcome in pool.map(run, seeds, chunksize=8):
            num_seeds += 1
            num_events += outcome.num_events
            ends.update(outcome.ends)
            if is_traced:
                print(*outcome.trace, sep="\n")
            if outcome.problem:
                failed.append(outcome)
                print(f"seed {outcome.seed} FAILED: {outcome.problem}", flush=True)
    elapsed_s = time.perf_counter() - started
    print(f"{num_seeds} seeds in {elapsed_s:.1f} s, {num_events} events, {len(failed)} failed")
    if num_seeds == 1:
        print("digest", outcome.digest)
    print("requests:", ", ".join(f"{count} {end}" for end, count in ends.most_common()))
    if failed:
        print("again with: scripts/simulate --trace --seed", failed[0].seed)
    return 1 if failed else 0


def _run_one(seed: int, *, bug: str | None, is_traced: bool) -> Outcome:
    with quiet(), planted(bug):
        return run_seed(seed, keep_trace=is_traced)


def _all_caught(seeds: dict[str, Iterable[int]]) -> int:
    caught = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(_hunt_one, seeds, seeds.values())
        for name, outcome in zip(seeds, found, strict=True):
            caught += isinstance(outcome, Outcome)
            if outcome is None:
                print(f"{name}: ESCAPED", flush=True)
            elif isinstance(outcome, BrokenPlant):
                print(f"{name}: BROKEN PLANT, not caught: {outcome}", flush=True)
            else:
                seen = f"seed {outcome.seed}: {outcome.problem[:110]}"
                print(f"{name}: caught by {seen}", flush=True)
    print(f"{caught} of {len(seeds)} planted bugs caught")
    return 0 if caught == len(seeds) else 1


def _hunt_one(name: str, seeds: Iterable[int]) -> Outcome | BrokenPlant | None:
    try:
        with quiet():
            return hunt(name, seeds)
    except BrokenPlant as broken:
        return broken


if __name__ == "__main__":
    sys.exit(main())
