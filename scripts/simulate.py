#!/usr/bin/env python
"""Runs whole clusters on virtual time, one a seed, and checks what the design promises.

    scripts/simulate.py --seeds 500            seeds 0 to 499; exit status 1 if one fails
    scripts/simulate.py --seed 17 --trace      one seed again, event by event
    scripts/simulate.py --planted              every planted bug must be caught

Routers' cores and workers are the real ones; see `scripts/simulation`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.simulation.bugs import BUGS, hunt, planted
from scripts.simulation.seeds import Outcome, quiet, run_seed


def main() -> int:
    args = _parse()
    with quiet():
        if args.planted:
            return _hunt_all(args.first, args.seeds)
        with planted(args.plant):
            seeds = (
                [args.seed] if args.seed is not None else range(args.first, args.first + args.seeds)
            )
            return _run(list(seeds), args.trace)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--seeds", type=int, default=500, help="how many (500)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--trace", action="store_true", help="print every event of a failed seed")
    parser.add_argument("--plant", choices=sorted(BUGS), help="run with this bug")
    parser.add_argument("--planted", action="store_true", help="hunt every planted bug")
    return parser.parse_args()


def _run(seeds: list[int], is_traced: bool) -> int:
    started, failed, ends = time.perf_counter(), list[Outcome](), Counter[str]()
    for seed in seeds:
        outcome = run_seed(seed, keep_trace=is_traced)
        ends.update(outcome.ends)
        if is_traced:
            print(*outcome.trace, sep="\n")
        if outcome.problem:
            failed.append(outcome)
            print(f"seed {seed} FAILED: {outcome.problem}")
        if len(seeds) == 1:
            print(f"seed {seed}: {outcome.num_events} events, digest {outcome.digest}")
    elapsed_s = time.perf_counter() - started
    print(
        f"{len(seeds)} seeds in {elapsed_s:.1f} s ({1000 * elapsed_s / len(seeds):.0f} ms each), "
        f"{len(failed)} failed"
    )
    print("requests:", ", ".join(f"{count} {end}" for end, count in ends.most_common()))
    if failed:
        print("again with: scripts/simulate.py --trace --seed", failed[0].seed)
    return 1 if failed else 0


def _hunt_all(first: int, limit: int) -> int:
    escaped = 0
    for name in BUGS:
        found = hunt(name, range(first, first + limit))
        escaped += found is None
        if found is None:
            print(f"{name}: ESCAPED {limit} seeds")
        else:
            print(f"{name}: caught by seed {found.seed}: {found.problem[:110]}")
    print(f"{len(BUGS) - escaped} of {len(BUGS)} planted bugs caught")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
