#!/usr/bin/env python3
"""What the router costs: CPU a token, time to a first token, requests a second, memory a stream.

    scripts/bench_router.py                                # all rows
    scripts/bench_router.py --rows saturated paced --peers ../peers --sglang ../router/bin/python
    scripts/bench_router.py --brief                        # a few tokens each: are they right?

A real router process, workers that compute nothing (`scripts/emitters.py`) and clients that check
every token (`scripts/streams.py`), each in processes of their own.  `--peers` is a directory with
the programs of those it is compared with, which run by turns with ours in every round: the floor,
`relay_floor.py` (one ZeroMQ message a step in, 64 chunks out, and nothing else), and with
`--sglang`, a Python that has it, sglang-router before `mock_worker.py`.  The time to a first token
is beside that by `bare_router.py`, which only passes on.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Final

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.sides import ROOT, Listening, ended, listening, started, wait_until_served

# sglang-router tells nobody when it is ready.
PEER_START_S: Final = 6.0


@dataclass(frozen=True)
class Row:
    """One thing that is measured."""

    name: str
    kind: str = "stream"
    face: str = "completions"
    streams: int = 64
    tokens: int = 1000
    pace_us: int = 0
    requests: int = 1

    def flags(self) -> list[str]:
        fields = ("face", "streams", "tokens", "pace_us", "requests")
        pairs = [(f"--{name.replace('_', '-')}", str(getattr(self, name))) for name in fields]
        return [self.kind, *[word for pair in pairs for word in pair]]

    @property
    def is_compared(self) -> bool:
        """Whether the peers do the same."""
        return self.kind == "stream" and self.face == "completions" and self.streams == 64


ROWS: Final = {
    row.name: row
    for row in (
        Row("memory", "hold", streams=1000),
        Row("saturated", tokens=4000),
        Row("paced", pace_us=10_000),
        Row("saturated-1", streams=1, tokens=20_000),
        Row("saturated-512", streams=512, tokens=4000),
        Row("paced-512", streams=512, tokens=200, pace_us=80_000),
        Row("chat", face="chat", tokens=4000),
        Row("chat-paced", face="chat", pace_us=10_000),
        Row("tcp", face="tcp", tokens=4000),
        Row("tcp-paced", face="tcp", pace_us=10_000),
        Row("ttft", "arrivals", tokens=8, pace_us=10_000, requests=1000),
        Row("one-token", "requests", tokens=1, requests=8000),
    )
}


def brief(row: Row) -> Row:
    """Return the same with little to do."""
    return replace(row, streams=min(row.streams, 8), tokens=min(row.tokens, 40), requests=20)


# Streams before anything is measured: a router makes some things only once.
WARM: Final = brief(ROWS["saturated"])


@dataclass(frozen=True)
class Running:
    """A router that listens; `model` is what its clients call theirs."""

    endpoints: dict[str, tuple[str, int]]
    pid: int
    model: str = "demo"
    # Where its workers note when each prompt came and when its first token left.
    notes: Path | None = None

    def address(self, face: str) -> list[str]:
        host, port = self.endpoints["tcp" if face == "tcp" else "http"]
        return [host, str(port)]


def ours(flags: list[str]) -> AbstractContextManager[Running]:
    """The router of this checkout and its emitters."""
    limits = ["--max-running-per-worker", "4096", "--max-requests-per-connection", "64"]
    return emitting(listening([*limits, *flags]))


def bare() -> AbstractContextManager[Running]:
    """One that only passes on, and its emitters."""
    return emitting(started(["scripts.bare_router"]))


@contextmanager
def emitting(served: AbstractContextManager[Listening]) -> Iterator[Running]:
    """A router with emitters of its own."""
    with served as (addresses, pid, buses), TemporaryDirectory() as directory:
        notes = Path(directory) / "notes"
        emitters = [sys.executable, "-m", "scripts.emitters", *buses, "--notes", str(notes)]
        with ended(subprocess.Popen(emitters, cwd=ROOT)):
            wait_until_served(addresses["http"])
            yield Running(addresses, pid, notes=notes)


@contextmanager
def sglang(python: str, peers: Path, row: Row) -> Iterator[Running]:
    """sglang-router and its mock workers, which are made for one row."""
    ports = [free_port() for _ in range(3)]
    with ExitStack() as stack:
        for port, tokens, pace_s in ((ports[0], 1, 0.0), (ports[1], row.tokens, row.pace_us / 1e6)):
            mock = [
                sys.executable,
                str(peers / "mock_worker.py"),
                str(port),
                str(tokens),
                str(pace_s),
            ]
            stack.enter_context(ended(subprocess.Popen(mock)))
        flags = ["--pd-disaggregation", "--prefill", f"http://127.0.0.1:{ports[0]}", "9000"]
        flags += ["--decode", f"http://127.0.0.1:{ports[1]}", "--port", str(ports[2])]
        flags += ["--policy", "round_robin", "--disable-retries", "--log-level", "error"]
        command = [python, "-m", "sglang_router.launch_router", *flags]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.enter_context(ended(process))
        time.sleep(PEER_START_S)
        yield Running({"http": ("127.0.0.1", ports[2])}, process.pid, "m")


def floor(peers: Path, row: Row) -> str:
    """Run the bare relay; return what it says."""
    steps = [str(row.tokens), str(row.pace_us / 1e6), "uvloop"]
    command = [sys.executable, str(peers / "relay_floor.py"), *steps]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"([0-9.]+) us", said)
    return f"{row.name:<14} {'bare relay':<12} {found[1] if found else said:>6} us CPU a token"


def measure(row: Row, router: Running) -> dict[str, Any]:
    """Have the clients do what the row says."""
    client = [sys.executable, "-m", "scripts.streams", *router.address(row.face), *row.flags()]
    client += ["--model", router.model, "--pid", str(router.pid)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(client, cwd=ROOT, **pipes) as process:  # type: ignore[call-overload]
        if row.kind == "hold":
            return hold(process.stdin, process.stdout, row, router)
        said, _ = process.communicate("go\n")
    measured: dict[str, Any] = json.loads(said)
    if measured["problems"]:
        raise SystemExit(f"{row.name}: {measured['problems'][0]}")
    if row.kind == "arrivals" and router.notes is not None:
        measured["added_s"] = added(measured["spans"], router.notes)
    return measured


def measure_new(start: Callable[[], AbstractContextManager[Running]], row: Row) -> dict[str, Any]:
    """Measure a router that has done nothing else: one that has would use the memory of ended
    streams again, and seem to need none."""
    with start() as router:
        measure(WARM, router)
        return measure(row, router)


def hold(stdin: IO[str], stdout: IO[str], row: Row, router: Running) -> dict[str, Any]:
    """Weigh the router with connections, and with a stream open on each."""
    before = own_bytes(router.pid)
    print("go", file=stdin, flush=True)
    stdout.readline()
    grown = own_bytes(router.pid) - before
    print("enough", file=stdin, flush=True)
    stdout.read()
    return {"bytes": grown / row.streams}


def own_bytes(pid: int) -> int:
    """Return the memory of a process and its children, but for that of files: whether it counts as
    theirs depends on who else has the same files open."""
    process = psutil.Process(pid)
    memories = [each.memory_info() for each in (process, *process.children(recursive=True))]
    return sum(int(memory.rss - memory.shared) for memory in memories)


def said(row: Row, who: str, measured: dict[str, Any]) -> str:
    """Return the line of a row."""
    start = f"{row.name:<14} {who:<12}"
    if "bytes" in measured:
        return f"{start} {measured['bytes'] / 1000:6.1f} kB an open stream"
    parts = [start]
    if "tokens" in measured:
        num, seconds = measured["tokens"], measured["seconds"]
        what = "requests" if row.kind == "requests" else "tokens"
        user, system = (1e6 * measured[name] / num for name in ("user_s", "system_s"))
        parts.append(f"{user + system:6.2f} us CPU a {what[:-1]} ({user:.2f} user)")
        parts.append(f"{num / seconds:9,.0f} {what}/s")
    if "added_s" in measured:
        quantiles = (1000 * np.quantile(measured["added_s"], share) for share in (0.5, 0.99))
        parts.append("added to the first token p50 {:.2f} p99 {:.2f} ms".format(*quantiles))
    return " ".join(parts)


def added(spans: list[tuple[int, float, float]], notes: Path) -> list[float]:
    """Return what lies between each client and the worker: of the time to its first token, all that
    the prompt was not at the worker."""
    lines = [line.split() for line in notes.read_text().splitlines()[-len(spans) :]]
    of_worker = sorted((int(key), float(came), float(left)) for key, came, left in lines)
    found = list[float]()
    # Those of one key are a second apart, so they come in the order in which they were asked.
    for (key, asked, first), (same, came, left) in zip(sorted(spans), of_worker, strict=True):
        assert key == same and asked < came <= left < first
        found.append((first - asked) - (left - came))
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--processes", type=int, default=1, help="of the router; beside one process, by turns"
    )
    parser.add_argument("--brief", action="store_true", help="only whether the tokens are right")
    parser.add_argument("--peers", type=Path, help="where relay_floor.py and mock_worker.py are")
    parser.add_argument("--sglang", help="a Python that has sglang_router")
    parser.add_argument("--router-args", default="", help="more flags of the router, as one word")
    given = parser.parse_args()
    rows = [brief(ROWS[name]) if given.brief else ROWS[name] for name in given.rows]
    flags = shlex.split(given.router_args)
    with ExitStack() as stack:
        starts = {
            f"router x {num}": partial(ours, [*flags, "--processes", str(num)])
            for num in sorted({1, given.processes})
        }
        routers = {who: stack.enter_context(start()) for who, start in starts.items()}
        for router in routers.values():
            measure(WARM, router)
        for _ in range(given.rounds):
            for row in rows:
                if row.kind == "arrivals":
                    with bare() as least:
                        print(said(row, "bare", measure(row, least)), flush=True)
                is_compared = given.peers is not None and row.is_compared
                if is_compared:
                    print(floor(given.peers, row), flush=True)
                for who, start in starts.items():
                    is_weighed = row.kind == "hold"
                    measured = measure_new(start, row) if is_weighed else measure(row, routers[who])
                    print(said(row, who, measured), flush=True)
                if is_compared and given.sglang is not None:
                    with sglang(given.sglang, given.peers, row) as peer:
                        print(said(row, "sglang", measure(row, peer)), flush=True)


if __name__ == "__main__":
    main()
