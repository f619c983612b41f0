#!/usr/bin/env python3
"""Measure how much 2,000 idle and 200 very slow ("dribbling") connections delay other clients.

    scripts/bench_slow_clients.py            # HTTP, then raw TCP
    scripts/bench_slow_clients.py --face tcp --idle 500 --dribbling 50 --grace-s 5

Starts two routers with hash workers each.  Many clients send requests to both at regular times, so
that a stall delays all requests due meanwhile.  A crowd of slow connections (the separate process
`bench/crowd.py`) connects to one router, to the other one in the next round, and stays until the
router has closed all of them.  The latencies of both routers in the same seconds are compared, with
a crowd and, as the control, without one: the control shows how far ratios are from 1 by chance.
The load is low, because on a busy machine the scheduling of cores would be measured instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.command.bench.connection import COMPLETIONS, open_http
from scripts.bench.pairs import Pairs
from scripts.bench.processes import ROOT, Cpu, Server, router, share_cores
from scripts.bench.tcp_connection import open_tcp

PROMPT, NUM_TOKENS = list(range(1, 33)), 4
WARM_UP_S = 3.0
P99_RATIO = 1.1
PARTS: Final = ("control", "beside", "connecting", "there", "closing")

Send = Callable[[], Awaitable[None]]


async def http_client(server: Server) -> Send:
    """Connect over HTTP, and return a function that sends a request and checks the response."""
    connection = await open_http(*server.http)
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True}

    async def send() -> None:
        await connection.post(COMPLETIONS, body)
        answer = json.loads(connection.body)
        if answer.get("usage", {}).get("completion_tokens") != NUM_TOKENS:
            raise RuntimeError(f"not an answer: {answer}")

    return send


async def tcp_client(server: Server) -> Send:
    """Connect over raw TCP, and return a function like that of `http_client`."""
    connection = await open_tcp(*server.addresses["tcp"])

    async def send() -> None:
        await connection.complete(PROMPT, NUM_TOKENS, seed=1)
        if len(found := connection.token_ids()) != NUM_TOKENS:
            raise RuntimeError(f"not an answer: {found}")

    return send


@dataclass(frozen=True)
class Sent:
    """One request: when it was sent (monotonic clock), to which router, and its latency."""

    at: float
    side: int
    seconds: float


async def measure(
    clients: list[list[Send]], is_over: Callable[[], bool], period_s: float
) -> list[Sent]:
    """Let each client send to each router once per period, evenly spread, until `is_over`."""
    sent: list[Sent] = []
    flat = [(side, send) for sends in clients for side, send in enumerate(sends)]
    begin = time.monotonic()

    async def repeat(due: float, side: int, send: Send) -> None:
        while not is_over():
            await asyncio.sleep(due - time.monotonic())
            at = time.monotonic()
            await send()
            now = time.monotonic()
            sent.append(Sent(at, side, now - at))
            due = max(due + period_s, now)

    await asyncio.gather(
        *(repeat(begin + period_s * i / len(flat), *each) for i, each in enumerate(flat))
    )
    return sent


@dataclass
class Visit:
    """The requests sent while a crowd was connected, its report, and its CPU use in cores."""

    sent: list[Sent]
    turns: dict[str, dict[str, Any]]
    cpu_share: float


async def beside_crowd(
    clients: list[list[Send]], face: str, server: Server, given: argparse.Namespace
) -> Visit:
    """Send requests while a crowd connects to `server` and until all of it is disconnected."""
    flags = ("idle", "dribbling", "interval_s", "rate")
    host, port = server.addresses[face]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scripts.bench.crowd", host, str(port), "--face", face),
        *(f"--{flag.replace('_', '-')}={getattr(given, flag)}" for flag in flags),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    begin, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    output = asyncio.create_task(process.communicate())
    sent = await measure(clients, output.done, given.period_s)
    turns = [json.loads(line) for line in (await output)[0].splitlines()]
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    by_name = {each["turn"]: each for each in turns}
    return Visit(sent, by_name, cpu_s / (time.monotonic() - begin))


class Books:
    """All requests, grouped by what the crowd was doing when each was sent."""

    def __init__(self) -> None:
        self.parts = {name: Pairs() for name in PARTS}
        self._cpu_s: list[list[float]] = []

    def enter(self, sent: list[Sent], crowded: int, *, part: str) -> None:
        for each in sent:
            self.parts[part].add(each.at, each.seconds, is_tried=each.side == crowded)

    def enter_visit(self, visit: Visit, crowded: int, cpu_s: list[float]) -> None:
        """Add the requests of a visit; `cpu_s` is the CPU time of each router during it."""
        there, closing = visit.turns["connected"]["at"], visit.turns["first closed"]["at"]
        for each in visit.sent:
            is_before, is_after = each.at < there, each.at >= closing
            part = "connecting" if is_before else "closing" if is_after else "there"
            self.enter([each], crowded, part=part)
        self.enter(visit.sent, crowded, part="beside")
        self._cpu_s.append([cpu_s[crowded], cpu_s[not crowded]])

    def report(self, num_connections: int) -> bool:
        """Print every group; return whether the p99 with a crowd is within the bound."""
        for name, pairs in self.parts.items():
            print(f"  {name:10s} {pairs.summary()}")
        tried, calm = (sum(used) / len(self._cpu_s) for used in zip(*self._cpu_s, strict=True))
        print(
            f"  CPU of the routers beside a crowd: {tried:.2f} s with it, {calm:.2f} s without, "
            f"{(tried - calm) / num_connections * 1e6:.0f} us a slow connection"
        )
        return self.parts["beside"].ratio(0.99).value <= P99_RATIO


async def run(face: str, servers: list[Server], given: argparse.Namespace) -> bool:
    """Run all rounds over HTTP or raw TCP; return whether the bounds hold."""
    connect = http_client if face == "http" else tcp_client
    clients = [[await connect(server) for server in servers] for _ in range(given.clients)]
    workers = [process.pid for server in servers for process in server.family[1:]]
    share_cores([server.pid for server in servers], workers)
    books, is_well = Books(), True
    print(f"{face}: {given.idle} idle and {given.dribbling} dribbling connections")

    async def alone(seconds: float) -> list[Sent]:
        until = time.monotonic() + seconds
        return await measure(clients, lambda: time.monotonic() > until, given.period_s)

    await alone(WARM_UP_S)
    for index in range(given.rounds):
        crowded = index % 2
        books.enter(await alone(given.seconds), crowded, part="control")
        num_fds = servers[crowded].process.num_fds()
        cpus = [Cpu([server.process]) for server in servers]
        visit = await beside_crowd(clients, face, servers[crowded], given)
        books.enter_visit(visit, crowded, [sum(cpu.used()) for cpu in cpus])
        is_well &= await is_undone(servers[crowded], num_fds, visit)
    return books.report(given.idle + given.dribbling) and is_well


async def is_undone(server: Server, num_fds: int, visit: Visit) -> bool:
    """Return whether the router has released all connections of a crowd."""
    end = visit.turns["all closed"]
    for _ in range(100):  # the router closes its side a moment later
        if server.process.num_fds() <= num_fds:
            break
        await asyncio.sleep(0.05)
    left = server.process.num_fds() - num_fds
    print(
        f"  a crowd that took {visit.cpu_share:.1%} of a core: refused {end['refused']}, not "
        f"closed by the router {end['left']}, file descriptors over the baseline {left}"
    )
    return not end["left"] and not end["refused"] and left <= 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--face", choices=("http", "tcp", "both"), default="both")
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--dribbling", type=int, default=200)
    parser.add_argument("--interval-s", type=float, default=5.0, help="between dribbled bytes")
    parser.add_argument("--rate", type=float, default=500.0, help="slow connections a second")
    parser.add_argument("--clients", type=int, default=16, help="of both routers")
    parser.add_argument("--period-s", type=float, default=0.25, help="of each, at each side")
    parser.add_argument("--rounds", type=int, default=4, help="crowds, to either side by turns")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn without a crowd")
    parser.add_argument("--grace-s", type=float, default=12.0, help="of the router")
    given = parser.parse_args()
    flags = ("--local", "1,1", "--executor", "hash", "--grace-s", str(given.grace_s))
    is_well = True
    for face in ("http", "tcp") if given.face == "both" else (given.face,):
        with router(*flags) as one, router(*flags) as other:
            is_well &= asyncio.run(run(face, [one, other], given))
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
