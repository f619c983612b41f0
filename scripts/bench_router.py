#!/usr/bin/env python3
"""Measure the router: CPU per token, time to first token, requests per second, memory per stream.

    scripts/bench_router.py                                # all rows
    scripts/bench_router.py --rows saturated paced --peers ../peers --sglang ../router/bin/python
    scripts/bench_router.py --rows saturated paced one-token --page --rounds 5
    scripts/bench_router.py --brief                        # only check that tokens are correct

Runs a real router, workers that compute nothing (`bench/emitters.py`) and clients that check every
token (`bench/router_clients.py`), each in separate processes.  `--peers` is a directory with
programs to compare with, which are measured alternately with the router in every round:
`relay_floor.py`, a lower bound that only forwards (per step one ZeroMQ message in, 64 chunks out),
and, if `--sglang` is a Python interpreter with sglang-router, that router with `mock_worker.py`.
The time to first token is compared with `bench/bare_router.py`, which only forwards.
`--page` measures what the operator's view costs: the router with a page open, and one that keeps no
timelines, alternately with the router in every round.
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
from threading import Thread
from typing import IO, Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.command.bench.table import Table
from router.http.events import IDLE_S, TICK_S
from scripts.bench.processes import ROOT, Server, router, running, started

# How long to wait for sglang-router, which does not report when it is ready.
PEER_START_S: Final = 6.0


@dataclass(frozen=True)
class Row:
    """One measurement: a row of the table."""

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
        """Whether the programs to compare with support this row."""
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
    """Return a short version of a row."""
    return replace(row, streams=min(row.streams, 8), tokens=min(row.tokens, 40), requests=20)


# The warm-up before any measurement.
WARM: Final = brief(ROWS["saturated"])


@dataclass(frozen=True)
class Running:
    """A running router that serves the model named `model`."""

    server: Server
    model: str = "demo"
    # A file to which its workers write when each prompt arrived and its first token was sent.
    notes: Path | None = None


def ours(flags: list[str]) -> AbstractContextManager[Running]:
    """Start the router of this checkout and its emitters."""
    limits = ("--max-running-per-worker", "4096", "--max-requests-per-connection", "64")
    # Each emitter has one role only.
    return emitting(router(*limits, "--local-prefill", "off", *flags))


def bare() -> AbstractContextManager[Running]:
    """Start the router that only forwards, and its emitters."""
    return emitting(started("scripts.bench.bare_router"))


@contextmanager
def emitting(start: AbstractContextManager[Server]) -> Iterator[Running]:
    """Start a router with its own emitters."""
    with start as server, TemporaryDirectory() as directory:
        notes = Path(directory) / "notes"
        with running("-m", "scripts.bench.emitters", *server.buses, "--notes", str(notes)):
            server.wait_until_ready()
            yield Running(server, notes=notes)


@contextmanager
def sglang(python: str, peers: Path, row: Row) -> Iterator[Running]:
    """Start sglang-router and mock workers configured for one row."""
    mock, ports = str(peers / "mock_worker.py"), [str(free_port()) for _ in range(3)]
    flags = ["--pd-disaggregation", "--prefill", f"http://127.0.0.1:{ports[0]}", "9000"]
    flags += ["--decode", f"http://127.0.0.1:{ports[1]}", "--port", ports[2]]
    flags += ["--policy", "round_robin", "--disable-retries", "--log-level", "error"]
    launch = ("-m", "sglang_router.launch_router", *flags)
    with (
        running(mock, ports[0], "1", "0.0"),
        running(mock, ports[1], str(row.tokens), str(row.pace_us / 1e6)),
        running(*launch, python=python, is_quiet=True) as process,
    ):
        time.sleep(PEER_START_S)
        yield Running(Server({"http": ("127.0.0.1", int(ports[2]))}, process.pid), "m")


def floor(peers: Path, row: Row) -> float:
    """Return the CPU time per token of the relay that only forwards, in microseconds."""
    steps = [str(row.tokens), str(row.pace_us / 1e6), "uvloop"]
    command = [sys.executable, str(peers / "relay_floor.py"), *steps]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"([0-9.]+) us", output)
    assert found, output
    return float(found[1])


def measure(row: Row, of: Running) -> dict[str, Any]:
    """Run the clients for a row and return their measurements."""
    host, port = of.server.addresses["tcp" if row.face == "tcp" else "http"]
    command = [sys.executable, "-m", "scripts.bench.router_clients", host, str(port)]
    command += [*row.flags(), "--model", of.model, "--pid", str(of.server.pid)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        if row.kind == "hold":
            assert process.stdin and process.stdout
            return hold(process.stdin, process.stdout, row, of.server)
        output, _ = process.communicate("go\n")
    measured: dict[str, Any] = json.loads(output)
    if measured["problems"]:
        raise SystemExit(f"{row.name}: {measured['problems'][0]}")
    if row.kind == "arrivals" and of.notes is not None:
        measured["added_s"] = added(measured["spans"], of.notes)
    return measured


@contextmanager
def page_open(server: Server) -> Iterator[None]:
    """Read the events of the page as a browser that shows it does."""
    with socket.create_connection(server.http) as connection:
        connection.sendall(b"GET /v1/cluster/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        reader = Thread(target=lambda: all(iter(partial(connection.recv, 1 << 20), b"")))
        reader.start()
        yield
        connection.shutdown(socket.SHUT_RDWR)
        reader.join()
    # The router counts for a few seconds more.
    time.sleep(IDLE_S + TICK_S)


def measure_new(start: Callable[[], AbstractContextManager[Running]], row: Row) -> dict[str, Any]:
    """Measure a new router, since an old one would reuse the memory of ended streams."""
    with start() as of:
        measure(WARM, of)
        return measure(row, of)


def hold(stdin: IO[str], stdout: IO[str], row: Row, server: Server) -> dict[str, Any]:
    """Measure the router's memory with idle connections, and with an open stream on each."""
    before = own_bytes(server)
    print("go", file=stdin, flush=True)
    stdout.readline()
    grown = own_bytes(server) - before
    print("enough", file=stdin, flush=True)
    stdout.read()
    return {"bytes": grown / row.streams}


def own_bytes(server: Server) -> int:
    """Return the memory of a router in bytes, without file pages, which may be shared."""
    memories = [each.memory_info() for each in server.family]
    return sum(int(memory.rss - memory.shared) for memory in memories)


def show(table: Table, row: Row, name: str, measured: dict[str, Any]) -> None:
    """Print the measurements of a row."""
    cells: list[str | float] = [""] * 6
    if "bytes" in measured:
        cells[5] = measured["bytes"] / 1000
    if "tokens" in measured:
        num = measured["tokens"]
        user, system = (1e6 * measured[name] / num for name in ("user_s", "system_s"))
        cells[:3] = user + system, user, num / measured["seconds"]
    if "added_s" in measured:
        cells[3:5] = [1000 * np.quantile(measured["added_s"], share) for share in (0.5, 0.99)]
    table.row(row.name, name, *cells)


def added(spans: list[tuple[int, float, float]], notes: Path) -> list[float]:
    """Return the times to first token, minus the time that each prompt spent at the worker."""
    lines = [line.split() for line in notes.read_text().splitlines()[-len(spans) :]]
    of_worker = sorted((int(key), float(came), float(left)) for key, came, left in lines)
    found = list[float]()
    # Requests with the same key are a second apart, so sorting keeps them in order.
    for (key, sent, first), (same, came, left) in zip(sorted(spans), of_worker, strict=True):
        assert key == same and sent < came <= left < first
        found.append((first - sent) - (left - came))
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--processes", type=int, default=1, help="of the router; beside one process, by turns"
    )
    parser.add_argument(
        "--page", action="store_true", help="beside a page that is open, and no timelines, by turns"
    )
    parser.add_argument("--brief", action="store_true", help="only whether the tokens are right")
    parser.add_argument("--peers", type=Path, help="where relay_floor.py and mock_worker.py are")
    parser.add_argument("--sglang", help="a Python that has sglang_router")
    parser.add_argument("--router-args", default="", help="more flags of the router, as one word")
    return parser.parse_args()


def main() -> None:
    given = parse_args()
    rows = [brief(ROWS[name]) if given.brief else ROWS[name] for name in given.rows]
    flags = shlex.split(given.router_args)
    with ExitStack() as stack:
        starts = {
            f"router x {num}": partial(ours, [*flags, "--processes", str(num)])
            for num in sorted({1, given.processes})
        }
        if given.page:
            starts["no timelines"] = partial(ours, [*flags, "--request-history", "0"])
        routers = {name: stack.enter_context(start()) for name, start in starts.items()}
        for of in routers.values():
            measure(WARM, of)
        columns = ("row:<14", "system:<12", "us CPU:>7.2f", "user:>7.2f", "a second:>10,.0f")
        table = Table(*columns, "ttft p50:>9.2f", "p99 ms:>9.2f", "kB a stream:>12.1f")
        for row in rows * given.rounds:
            if row.kind == "arrivals":
                with bare() as least:
                    show(table, row, "bare", measure(row, least))
            is_compared = given.peers is not None and row.is_compared
            if is_compared:
                table.row(row.name, "bare relay", floor(given.peers, row), *[""] * 5)
            for name, start in starts.items():
                is_new = row.kind == "hold"
                measured = measure_new(start, row) if is_new else measure(row, routers[name])
                show(table, row, name, measured)
            if given.page and row.kind != "hold":
                with page_open(routers["router x 1"].server):
                    show(table, row, "page open", measure(row, routers["router x 1"]))
            if is_compared and given.sglang is not None:
                with sglang(given.sglang, given.peers, row) as peer:
                    show(table, row, "sglang", measure(row, peer))


if __name__ == "__main__":
    main()
