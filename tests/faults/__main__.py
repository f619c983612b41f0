"""Real processes, real faults: kill, freeze, cancel, stall, and check what every client saw.

    scripts/chaos --kill-sweep     800 requests while workers are killed in each state
    scripts/chaos --processes 60   so many processes killed of workers that have two each
    scripts/chaos --outages        a worker frozen, a black hole, the router killed
    scripts/chaos --cancels 10000  cancels at every moment, then nothing may be held
    scripts/chaos --slow-clients   one that stops reading and 64 that read slowly
    scripts/chaos --soak 30        minutes of load with a fault every few seconds

Each starts a cluster of its own on free ports and prints its seed and its figures.  The exit status
is 1 when something was not as router/README.md promises.  The parts are in tests/faults/.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from scripts.bench.pairs import Pairs
from scripts.bench.processes import share_cores
from tests.faults import cancels, kills, outages, processes, slow, soak
from tests.faults.checks import problems
from tests.faults.clients import Record
from tests.faults.cluster import FaultyCluster, timed_until_idle
from tests.faults.load import draw_requests
from wire.options import Options

FREE_AGAIN_S: Final = 1.0
DETECTED_S: Final = 4.0
SERVING_S: Final = 2.0
P99_RATIO: Final = 1.1


def kill_sweep(args: argparse.Namespace, directory: Path) -> list[str]:
    """2 prefill and 2 decode workers, 8 clients; a worker is killed every few seconds."""
    records = draw_requests(args.seed, args.requests, prompt=(200, 2500), answer=(30, 150))
    worker_args = (*kills.WORKER_ARGS, *kills.KV_ARGS[args.kv])
    with FaultyCluster(
        directory, router_args=kills.ROUTER_ARGS, worker_args=worker_args
    ) as cluster:
        result = asyncio.run(kills.sweep(cluster, records, seed=args.seed))
        cluster.until_whole()
        idle_s = timed_until_idle(cluster)
        mapped, num_read = kills.mapped(cluster), cluster.log().count("KV is read from memory")
    for name in kills.POINTS:
        print(f"  killed while {name}: {result.kills[name]}")
    print(
        f"  {sum(result.kills.values())} kills in {result.seconds:.0f} s, "
        f"{min(result.open_requests, default=0)} to {max(result.open_requests, default=0)} "
        f"requests open at each; nothing held {idle_s:.2f} s after the end, "
        f"KV read from memory {num_read} times"
    )
    missed = [f"never killed while {name}" for name in kills.POINTS if not result.kills[name]]
    if not mapped <= set(range(3 if args.kv == "memory" else 1)):  # of the two that live
        missed.append(f"decode workers have memory of {sorted(mapped)} prefill workers mapped")
    if bool(num_read) != (args.kv == "memory"):
        missed.append(f"KV was read from memory {num_read} times")
    return _judged(records) + missed


def process_sweep(args: argparse.Namespace, directory: Path) -> list[str]:
    """2 prefill and 2 decode workers, each divided in two; any process is killed, leader or not."""
    path = processes.model(directory / "divided")
    records = draw_requests(args.seed, 60, prompt=(50, 600), answer=(20, 60))
    with FaultyCluster(
        directory, executor="torch", model=path, worker_args=processes.WORKER_ARGS
    ) as cluster:
        result = asyncio.run(processes.sweep(cluster, records, args.processes, args.seed))
        idle_s = timed_until_idle(cluster)
        left = processes.left_over(cluster, path)
    late = [took for took in result.ended_s if took > processes.ENDED_S]
    print(
        f"  {sum(result.kills.values())} kills {dict(result.kills)} under {result.num_requests} "
        f"requests: {len(result.problems)} lost or wrong; a worker without one of its processes "
        f"ended after {1000 * max(result.ended_s):.0f} ms at most; nothing held {idle_s:.2f} s "
        f"after the end, {len(left)} processes left over"
    )
    found = [f"a worker lived {took:.2f} s without one of its processes" for took in late]
    return result.problems + found + [f"process {pid} is nobody's" for pid in left]


def out(args: argparse.Namespace, directory: Path) -> list[str]:
    """A worker frozen for 10 s, one behind a black hole for 10 s, then the router killed."""
    found: list[str] = []
    with FaultyCluster(directory, worker_args=("--hash-step-ms", "10")) as cluster:
        for name, key, fault in (
            ("decode frozen", ("decode", 0), outages.frozen),
            ("prefill frozen", ("prefill", 0), outages.frozen),
            ("decode in a black hole", ("decode", 1), outages.black_holed),
        ):
            records = draw_requests(args.seed, 80, prompt=(200, 2500), answer=(100, 200))
            result = asyncio.run(outages.outage(cluster, key, records, fault=fault, lasts_s=10.0))
            idle_s = timed_until_idle(cluster)
            print(
                f"  {name} for 10 s: suspect after {result.suspected_s:.2f} s, lost after "
                f"{result.detected_s:.2f} s, back "
                f"{result.back_s:.2f} s after its end; nothing held {idle_s:.2f} s later"
            )
            found += _judged(records)
            if result.detected_s > DETECTED_S:
                found.append(f"{name}: detected after {result.detected_s:.2f} s")
        found += _router_killed(args, cluster)
    return found


def _router_killed(args: argparse.Namespace, cluster: FaultyCluster) -> list[str]:
    records = [
        Record(drawn.prompt, Options(ignore_eos=True), 1000, drawn.face)  # too long to end before
        for drawn in draw_requests(args.seed, 16, prompt=(20, 500), answer=(1, 1))
    ]
    result = asyncio.run(outages.restart_router(cluster, records, after_tokens=5))
    cluster.until_whole()
    idle_s = timed_until_idle(cluster)
    errors = sum(bool(record.error) for record in records)
    print(
        f"  router killed: {errors} of {len(records)} clients saw an error; the new process "
        f"listens after {result.listening_s:.2f} s and serves {result.serving_s:.2f} s after its "
        f"start; nothing held {idle_s:.2f} s after every worker was back"
    )
    found = problems(records, may_fail=True, processes=2)
    if result.serving_s - result.listening_s > SERVING_S:
        found.append(f"serving {result.serving_s - result.listening_s:.2f} s after it listens")
    if errors != len(records):
        found.append(f"{len(records) - errors} clients saw no error")
    return found


def cancel_storm(args: argparse.Namespace, directory: Path) -> list[str]:
    """Cancels at random moments; a second after the last nothing may be held anywhere."""
    with FaultyCluster(
        directory, router_args=cancels.ROUTER_ARGS, worker_args=cancels.WORKER_ARGS
    ) as cluster:
        result = asyncio.run(cancels.storm(cluster, args.cancels, seed=args.seed))
        idle_s = timed_until_idle(cluster)
    print(f"  {result.total} cancels in {result.seconds:.0f} s: {dict(result.cancels)}")
    print(f"  nothing held on any worker {idle_s:.2f} s after the last")
    found = _judged(result.bystanders)
    return found + ([f"free after {idle_s:.2f} s"] if idle_s > FREE_AGAIN_S else [])


def slow_clients(args: argparse.Namespace, directory: Path) -> list[str]:
    """Two clusters, the same streams at both: slow clients come to one, then to the other.

    Before each, as the control, all clients of both read at once.
    """
    control, beside = Pairs(), Pairs()
    found: list[str] = []
    with ExitStack() as stack:
        clusters = [stack.enter_context(_quiet(directory / name)) for name in ("one", "other")]
        share_cores(
            [cluster.router.pid for cluster in clusters],
            [worker.pid for cluster in clusters for worker in cluster.workers.values()],
        )
        before = [cluster.usage(["router"])["router"] for cluster in clusters]
        for index in range(args.rounds):
            tried, calm = clusters[index % 2], clusters[1 - index % 2]
            for pairs, others in ((control, slow.readers()), (beside, slow.slow_ones())):
                sides = asyncio.run(slow.side_by_side(tried, calm, others, seed=args.seed + index))
                for records, is_tried in zip(sides, (True, False), strict=True):
                    slow.enter(pairs, records, is_tried=is_tried)
                    found += problems(records, processes=2)
                idle_s = max(map(timed_until_idle, clusters))
        after = [cluster.usage(["router"])["router"] for cluster in clusters]
        num_cut = sum(map(slow.num_cut, clusters))
    print(f"  between tokens, 65 others read:      {control.summary()}")
    print(f"  between tokens, 65 others are slow:  {beside.summary()}")
    grown = [(b.rss_bytes - a.rss_bytes) >> 20 for a, b in zip(before, after, strict=True)]
    print(
        f"  {num_cut} clients were cut; the routers grew by {grown} MiB; free {idle_s:.2f} s later"
    )
    if num_cut < args.rounds:
        found.append("a client that does not read was not cut")
    ratio = beside.ratio(0.99).value
    if ratio > P99_RATIO:
        found.append(f"p99 is {ratio:.2f} of what it is beside clients that read")
    return found


def _quiet(directory: Path) -> FaultyCluster:
    directory.mkdir()
    return FaultyCluster(
        directory,
        prefills=1,
        decodes=1,
        router_args=slow.ROUTER_ARGS,
        worker_args=slow.WORKER_ARGS,
    )


def soaked(args: argparse.Namespace, directory: Path) -> list[str]:
    """Mixed load with faults; what the survivors hold is compared from begin to end."""
    with FaultyCluster(
        directory, router_args=soak.ROUTER_ARGS, worker_args=soak.WORKER_ARGS
    ) as cluster:
        result = asyncio.run(soak.soak(cluster, args.soak, seed=args.seed))
        cluster.until_whole()
        idle_s = timed_until_idle(cluster)
        result.samples.append((60 * args.soak, cluster.usage(soak.SURVIVORS)))  # at rest
    print(f"  {len(result.records)} requests, {result.cancels} cancels, {dict(result.faults)}")
    for name in soak.SURVIVORS:
        series = result.series(name)
        for title, values in (
            ("RSS MiB", [usage.rss_bytes >> 20 for usage in series]),
            ("fds", [usage.num_fds for usage in series]),
            ("threads", [usage.num_threads for usage in series]),
            ("thousand Python blocks", [usage.python_blocks // 1000 for usage in series]),
        ):
            if not any(values):
                continue  # only the router tells
            tenths = [values[len(values) * i // 10] for i in range(10)] + [values[-1]]
            print(f"  {name} {title}: {' '.join(map(str, tenths))}")
    print(f"  nothing held {idle_s:.2f} s after the end")
    return _judged(result.records)


def _judged(records: list[Record]) -> list[str]:
    found = problems(records, processes=2)
    print(f"  {len(found)} of {len(records)} requests failed or differ from the fault-free run")
    return found


RUNS: Final[dict[str, Callable[[argparse.Namespace, Path], list[str]]]] = {
    "kill_sweep": kill_sweep,
    "processes": process_sweep,
    "outages": out,
    "cancels": cancel_storm,
    "slow_clients": slow_clients,
    "soak": soaked,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kill-sweep", action="store_true", help="SIGKILL in every state")
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="so many killed")
    parser.add_argument("--outages", action="store_true", help="SIGSTOP, black hole, router")
    parser.add_argument("--cancels", type=int, default=0, metavar="N", help="so many cancels")
    parser.add_argument("--slow-clients", action="store_true", help="clients that do not read")
    parser.add_argument("--soak", type=float, default=0, metavar="MINUTES", help="load and faults")
    parser.add_argument("--seed", type=int, default=5, help="of the load and of the faults")
    parser.add_argument("--requests", type=int, default=800, help="of the kill sweep")
    parser.add_argument("--kv", default="sockets", choices=kills.KV_ARGS, help="its way there")
    parser.add_argument("--rounds", type=int, default=2, help="of --slow-clients")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this directory")
    args = parser.parse_args()
    if not any(getattr(args, name) for name in RUNS):
        parser.error(
            "say what to try: " + ", ".join(f"--{name.replace('_', '-')}" for name in RUNS)
        )
    return args


def main() -> int:
    args = arguments()
    failed = 0
    for name, run in RUNS.items():
        if not getattr(args, name):
            continue
        print(f"{name}, seed {args.seed}", flush=True)
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            kept = args.logs and tempfile.mkdtemp(prefix=f"{name}-", dir=args.logs)
            found = run(args, Path(kept or temporary))
        for problem in found[:10]:
            print(f"  PROBLEM {problem}")
        failed += bool(found)
        print(f"{name}: {'FAILED' if found else 'ok'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
