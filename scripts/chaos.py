"""Real processes, real faults: kill, freeze, cut, cancel, stall, and check what every client saw.

    python scripts/chaos.py --kill-sweep             # 800 requests while workers are killed
    python scripts/chaos.py --soak 30                # minutes of load with faults

Each run starts a cluster of its own on free ports, prints its seed and its figures, and exits 1
when an invariant of DESIGN 8 did not hold.  The parts are in scripts/faults/.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.faults import kills
from scripts.faults.checks import problems
from scripts.faults.cluster import FaultyCluster, timed_until_idle
from scripts.faults.load import draw_requests


def kill_sweep(args: argparse.Namespace, directory: Path) -> list[str]:
    """2 prefill and 2 decode workers, 8 clients; a worker is killed every few seconds."""
    records = draw_requests(args.seed, args.requests, prompt=(200, 2500), answer=(20, 80))
    with FaultyCluster(
        directory, router_args=kills.ROUTER_ARGS, worker_args=kills.WORKER_ARGS
    ) as cluster:
        result = asyncio.run(kills.sweep(cluster, records, seed=args.seed))
        cluster.until_whole()
        idle_s = timed_until_idle(cluster)
    for name in kills.POINTS:
        print(f"  killed while {name}: {result.kills[name]}")
    print(
        f"  {sum(result.kills.values())} kills in {result.seconds:.0f} s, "
        f"{min(result.open_requests)} to {max(result.open_requests)} requests open at each; "
        f"nothing held {idle_s:.2f} s after"
    )
    found = problems(records, processes=2)
    print(f"  {len(found)} of {len(records)} requests failed or differ from the fault-free run")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=5, help="of the load and of the faults")
    parser.add_argument("--requests", type=int, default=800, help="of the kill sweep")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this directory")
    parser.add_argument("--kill-sweep", action="store_true", help="SIGKILL in every state")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    runs: list[tuple[str, Callable[[argparse.Namespace, Path], list[str]]]] = []
    if args.kill_sweep:
        runs.append(("kill sweep", kill_sweep))
    failed = 0
    for name, run in runs:
        print(f"{name}, seed {args.seed}", flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            directory = args.logs / name.replace(" ", "-") if args.logs else Path(temporary)
            directory.mkdir(parents=True, exist_ok=True)
            found = run(args, directory)
        for problem in found[:10]:
            print(f"  PROBLEM {problem}")
        failed += bool(found)
        print(f"{name}: {'FAILED' if found else 'ok'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
