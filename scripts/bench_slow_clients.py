#!/usr/bin/env python3
"""What slow clients cost the others: 2,000 idle and 200 dribbling connections beside real requests.

    scripts/bench_slow_clients.py            # HTTP, then raw TCP
    scripts/bench_slow_clients.py --face tcp --idle 500 --dribbling 50 --grace-s 5

Starts a router with hash workers.  Some clients ask all the time, by turns alone and beside the
slow ones: from the first of those connecting until the router has closed them all.  The slow ones
are a process of their own (`scripts/crowd.py`), and the pauses leave the cores room: a full machine
would measure who gets the core, not who waits for whom.  Prints both p99, the router's CPU time a
request, whether every slow connection was closed by its timer, and its file descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wire.aio.tcp import connect
from wire.frames import ANY_RANK, DecodeDone, DecodeRequest, Error, PrefillRequest
from wire.options import Options
from wire.payloads import encode_prompt

ROOT = Path(__file__).resolve().parent.parent
PROMPT, NUM_TOKENS = list(range(1, 33)), 8
START_S, WARM_UP_S = 120.0, 3.0

Ask = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Place:
    """Where the router listens, and which process it is."""

    host: str
    port: int
    pid: int

    @property
    def num_fds(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    @property
    def cpu_s(self) -> float:
        """What the router has used, without its workers."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def router(face: str, grace_s: float) -> Iterator[Place]:
    """A router with one prefill and one decode worker."""
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready"
        endpoints = ["--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--bus", "tcp://127.0.0.1:0"]
        flags = ["--local", "1,1", "--executor", "hash", "--log-level", "error"]
        limits = ["--grace-s", str(grace_s), "--ready-file", str(ready)]
        command = [sys.executable, "-m", "router", *endpoints, *flags, *limits]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            deadline = time.monotonic() + START_S
            while not ready.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            url = json.loads(ready.read_text())[face]
            host, port = url.rpartition("//")[2].rsplit(":", 1)
            yield Place(host, int(port), process.pid)
        finally:
            process.terminate()
            process.wait(60)


async def http_client(place: Place) -> Ask:
    """A client that asks over one kept connection."""
    reader, writer = await asyncio.open_connection(place.host, place.port)
    body = json.dumps({"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def ask() -> None:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        fields = head.lower().split(b"content-length: ")
        answer = json.loads(await reader.readexactly(int(fields[1].split(b"\r\n")[0])))
        if answer.get("usage", {}).get("completion_tokens") != NUM_TOKENS:
            raise RuntimeError(f"not an answer: {answer}")

    return ask


async def tcp_client(place: Place) -> Ask:
    """The same over raw TCP."""
    client = await connect(place.host, place.port)
    payload, ids = encode_prompt(PROMPT, Options(ignore_eos=True)), iter(range(1, 1 << 32))

    async def ask() -> None:
        request_id = next(ids)
        client.send(PrefillRequest(request_id, len(PROMPT), ANY_RANK), payload)
        client.send(DecodeRequest(request_id, NUM_TOKENS - 1))
        while (message := await client.next_message()) is not None:
            if isinstance(message.frame, DecodeDone):
                return
            if isinstance(message.frame, Error):
                raise RuntimeError(f"not an answer: {message.frame}")
        raise RuntimeError("the router hung up")

    return ask


async def until_served(make_client: Callable[[Place], Awaitable[Ask]], place: Place) -> Ask:
    """A client whose first request has been answered: the workers are there."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            ask = await make_client(place)
            await ask()
            return ask
        except (RuntimeError, IndexError, OSError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Asked:
    """One request: when it was sent, on the monotonic clock, and how long its answer took."""

    at: float
    seconds: float


async def measure(clients: list[Ask], is_over: Callable[[], bool], pause_s: float) -> list[Asked]:
    """Ask from every client until it is over."""
    asked: list[Asked] = []

    async def go_on(ask: Ask) -> None:
        while not is_over():
            begin = time.monotonic()
            await ask()
            asked.append(Asked(begin, time.monotonic() - begin))
            await asyncio.sleep(pause_s)

    await asyncio.gather(*map(go_on, clients))
    return asked


async def beside_crowd(
    clients: list[Ask], face: str, place: Place, given: argparse.Namespace
) -> tuple[list[Asked], dict[str, dict[str, Any]], float]:
    """Ask while a crowd comes and goes; return also the turns it told, and its share of a core."""
    flags = ("idle", "dribbling", "interval_s", "rate")
    crowd = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "scripts/crowd.py"), place.host, str(place.port)),
        *("--face", face),
        *(f"--{flag.replace('_', '-')}={getattr(given, flag)}" for flag in flags),
        stdout=asyncio.subprocess.PIPE,
    )
    begin, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    said = asyncio.create_task(crowd.communicate())
    asked = await measure(clients, said.done, given.pause_s)
    told = [json.loads(line) for line in (await said)[0].splitlines()]
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return asked, {each["turn"]: each for each in told}, cpu_s / (time.monotonic() - begin)


def quantile(asked: list[Asked], share: float) -> float:
    """Return that quantile in milliseconds."""
    seconds = sorted(each.seconds for each in asked)
    return seconds[min(int(share * len(seconds)), len(seconds) - 1)] * 1e3


@dataclass
class Books:
    """What was measured, over all rounds; `cpu_s` is the router's own."""

    alone: list[Asked] = field(default_factory=list)
    beside: list[Asked] = field(default_factory=list)
    connecting: list[Asked] = field(default_factory=list)
    there: list[Asked] = field(default_factory=list)
    closing: list[Asked] = field(default_factory=list)
    alone_cpu_s: float = 0.0
    beside_cpu_s: float = 0.0
    p99_alone_ms: list[float] = field(default_factory=list)

    def sort(self, asked: list[Asked], turns: dict[str, dict[str, Any]]) -> None:
        """Enter the requests of one crowd, by what it did when they were sent."""
        there, closing = turns["connected"]["at"], turns["first closed"]["at"]
        for each in asked:
            is_before, is_after = each.at < there, each.at >= closing
            part = self.connecting if is_before else self.closing if is_after else self.there
            part.append(each)
        self.beside += asked

    def report(self) -> None:
        """Print both quantiles of every part, against those of all that were alone."""
        for name in ("alone", "beside", "connecting", "there", "closing"):
            asked: list[Asked] = getattr(self, name)
            if not asked:
                continue
            p50, p99 = (quantile(asked, share) for share in (0.5, 0.99))
            was50, was99 = (quantile(self.alone, share) for share in (0.5, 0.99))
            print(
                f"  {name:10s} {len(asked):6d} requests  p50 {p50:6.2f} ms {p50 / was50 - 1:+7.1%}"
                f"  p99 {p99:6.2f} ms {p99 / was99 - 1:+7.1%}"
            )
        print("  p99 of the turns alone: " + ", ".join(f"{each:.1f}" for each in self.p99_alone_ms))
        costs = self.alone_cpu_s / len(self.alone), self.beside_cpu_s / len(self.beside)
        print(
            f"  router CPU a request: {costs[0] * 1e6:.0f} us alone, {costs[1] * 1e6:.0f} us "
            "beside (what it spends on the slow ones included)"
        )


async def run(face: str, place: Place, given: argparse.Namespace) -> bool:
    make_client = http_client if face == "http" else tcp_client
    clients = [await until_served(make_client, place) for _ in range(given.clients)]
    num_fds, books, is_well = place.num_fds, Books(), True
    print(f"{face}: {given.idle} idle and {given.dribbling} dribbling connections")

    async def alone(seconds: float) -> list[Asked]:
        until = time.monotonic() + seconds
        return await measure(clients, lambda: time.monotonic() > until, given.pause_s)

    async def alone_on_the_books() -> None:
        cpu_s = place.cpu_s
        asked = await alone(given.seconds)
        books.alone_cpu_s += place.cpu_s - cpu_s
        books.alone += asked
        books.p99_alone_ms.append(quantile(asked, 0.99))

    await alone(WARM_UP_S)
    await alone_on_the_books()
    for _ in range(given.rounds):
        cpu_s = place.cpu_s
        asked, turns, share = await beside_crowd(clients, face, place, given)
        books.beside_cpu_s += place.cpu_s - cpu_s
        books.sort(asked, turns)
        is_well &= await is_undone(place, num_fds, turns["all closed"], share)
        await alone_on_the_books()
    books.report()
    return is_well


async def is_undone(place: Place, num_fds: int, end: dict[str, Any], share: float) -> bool:
    """Whether nothing of a crowd is left."""
    for _ in range(100):  # the router closes its side a moment after ours
        if place.num_fds <= num_fds:
            break
        await asyncio.sleep(0.05)
    left = place.num_fds - num_fds
    print(
        f"  a crowd that took {share:.1%} of a core: refused {end['refused']}, not closed by the "
        f"router {end['left']}, file descriptors over the baseline {left}"
    )
    return not end["left"] and not end["refused"] and left <= 0


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--face", choices=("http", "tcp", "both"), default="both")
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--dribbling", type=int, default=200)
    parser.add_argument("--interval-s", type=float, default=5.0, help="between dribbled bytes")
    parser.add_argument("--rate", type=float, default=500.0, help="slow connections a second")
    parser.add_argument("--clients", type=int, default=4, help="that ask all the time")
    parser.add_argument("--pause-s", type=float, default=0.03, help="of each between two requests")
    parser.add_argument(
        "--rounds", type=int, default=3, help="crowds, each between two turns alone"
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="of each turn alone")
    parser.add_argument("--grace-s", type=float, default=12.0, help="of the router")
    given = parser.parse_args()
    is_well = True
    for face in ("http", "tcp") if given.face == "both" else (given.face,):
        with router(face, given.grace_s) as place:
            is_well &= asyncio.run(run(face, place, given))
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
