#!/usr/bin/env python3
"""What slow clients cost the others: 2,000 idle and 200 dribbling connections beside real requests.

    scripts/bench_slow_clients.py            # HTTP, then raw TCP
    scripts/bench_slow_clients.py --face tcp --idle 500 --dribbling 50 --grace-s 5

Starts two routers with hash workers each.  Many clients ask both, interleaved, each seldom: a stall
is felt by all that are due meanwhile.  A crowd of slow connections (`scripts/crowd.py`, a process
of its own) comes to one of the two, to the other one in the next round, and stays until the router
has closed them all.  Compared are the two routers in the same seconds, beside a crowd and, as the
control, with none: the control says how far from 1 a ratio is by chance.  The pauses leave the
cores room: a full machine would measure who gets the core, not who waits for whom.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.paired import Pairs
from scripts.sides import ROOT, START_S, Side, router, share_cores
from scripts.tcp_client import connect
from wire.frames import ANY_RANK, DecodeDone, DecodeRequest, Error, PrefillRequest
from wire.options import Options
from wire.payloads import encode_prompt

PROMPT, NUM_TOKENS = list(range(1, 33)), 4
WARM_UP_S = 3.0
P99_RATIO = 1.1

Ask = Callable[[], Awaitable[None]]


async def http_client(side: Side) -> Ask:
    """A client that asks over one kept connection."""
    reader, writer = await asyncio.open_connection(side.host, side.port)
    body = json.dumps({"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def ask() -> None:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        fields = head.lower().split(b"content-length: ")
        answer = json.loads(await reader.readexactly(int(fields[1].split(b"\r\n")[0])))
        if answer.get("usage", {}).get("completion_tokens") != NUM_TOKENS:
            raise RuntimeError(f"not an answer: {answer}")

    return ask


async def tcp_client(side: Side) -> Ask:
    """The same over raw TCP."""
    client = await connect(side.host, side.port)
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


async def until_served(make_client: Callable[[Side], Awaitable[Ask]], side: Side) -> Ask:
    """A client whose first request has been answered: the workers are there."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            ask = await make_client(side)
            await ask()
            return ask
        except (RuntimeError, IndexError, OSError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Asked:
    """One request: when it was sent, on the monotonic clock, to whom, and how long it took."""

    at: float
    side: int
    seconds: float


async def measure(
    clients: list[list[Ask]], is_over: Callable[[], bool], period_s: float
) -> list[Asked]:
    """Each client asks each side once a period, all evenly spread, until it is over."""
    asked: list[Asked] = []
    flat = [(side, ask) for asks in clients for side, ask in enumerate(asks)]
    begin = time.monotonic()

    async def go_on(due: float, side: int, ask: Ask) -> None:
        while not is_over():
            await asyncio.sleep(due - time.monotonic())
            sent = time.monotonic()
            await ask()
            now = time.monotonic()
            asked.append(Asked(sent, side, now - sent))
            due = max(due + period_s, now)

    await asyncio.gather(
        *(go_on(begin + period_s * i / len(flat), *each) for i, each in enumerate(flat))
    )
    return asked


@dataclass
class Visit:
    """What the others saw of a crowd's visit, and what it said itself: turns, and its share of a
    core."""

    asked: list[Asked]
    turns: dict[str, dict[str, Any]]
    cpu_share: float


async def beside_crowd(
    clients: list[list[Ask]], face: str, side: Side, given: argparse.Namespace
) -> Visit:
    """Ask while a crowd comes to that side and goes."""
    flags = ("idle", "dribbling", "interval_s", "rate")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "scripts/crowd.py"), side.host, str(side.port)),
        *("--face", face),
        *(f"--{flag.replace('_', '-')}={getattr(given, flag)}" for flag in flags),
        stdout=asyncio.subprocess.PIPE,
    )
    begin, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    said = asyncio.create_task(process.communicate())
    asked = await measure(clients, said.done, given.period_s)
    told = [json.loads(line) for line in (await said)[0].splitlines()]
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    turns = {each["turn"]: each for each in told}
    return Visit(asked, turns, cpu_s / (time.monotonic() - begin))


class Books:
    """All that was measured, by what the crowd did when a request was due."""

    def __init__(self) -> None:
        self.parts = {
            name: Pairs() for name in ("control", "beside", "connecting", "there", "closing")
        }
        self._cpu_s: list[list[float]] = []

    def enter(self, asked: list[Asked], crowded: int, *, part: str) -> None:
        for each in asked:
            self.parts[part].add(each.at, each.seconds, is_tried=each.side == crowded)

    def enter_visit(self, visit: Visit, crowded: int, cpu_s: list[float]) -> None:
        """`cpu_s` is what either router used meanwhile."""
        there, closing = visit.turns["connected"]["at"], visit.turns["first closed"]["at"]
        for each in visit.asked:
            is_before, is_after = each.at < there, each.at >= closing
            part = "connecting" if is_before else "closing" if is_after else "there"
            self.enter([each], crowded, part=part)
        self.enter(visit.asked, crowded, part="beside")
        self._cpu_s.append([cpu_s[crowded], cpu_s[not crowded]])

    def report(self, num_connections: int) -> bool:
        """Print every part; whether others' p99 is within the bound."""
        for name, pairs in self.parts.items():
            print(f"  {name:10s} {pairs.summary()}")
        tried, calm = (sum(used) / len(self._cpu_s) for used in zip(*self._cpu_s, strict=True))
        print(
            f"  CPU of the routers beside a crowd: {tried:.2f} s with it, {calm:.2f} s without, "
            f"{(tried - calm) / num_connections * 1e6:.0f} us a slow connection"
        )
        return self.parts["beside"].ratio(0.99).value <= P99_RATIO


async def run(face: str, sides: list[Side], given: argparse.Namespace) -> bool:
    make_client = http_client if face == "http" else tcp_client
    clients = [
        [await until_served(make_client, side) for side in sides] for _ in range(given.clients)
    ]
    workers = [pid for side in sides for pid in side.workers]
    share_cores([side.pid for side in sides], workers)
    books, is_well = Books(), True
    print(f"{face}: {given.idle} idle and {given.dribbling} dribbling connections")

    async def alone(seconds: float) -> list[Asked]:
        until = time.monotonic() + seconds
        return await measure(clients, lambda: time.monotonic() > until, given.period_s)

    await alone(WARM_UP_S)
    for index in range(given.rounds):
        crowded = index % 2
        books.enter(await alone(given.seconds), crowded, part="control")
        num_fds, before = sides[crowded].num_fds, [side.cpu_s for side in sides]
        visit = await beside_crowd(clients, face, sides[crowded], given)
        used = [side.cpu_s - cpu_s for side, cpu_s in zip(sides, before, strict=True)]
        books.enter_visit(visit, crowded, used)
        is_well &= await is_undone(sides[crowded], num_fds, visit)
    return books.report(given.idle + given.dribbling) and is_well


async def is_undone(side: Side, num_fds: int, visit: Visit) -> bool:
    """Whether nothing of a crowd is left."""
    end = visit.turns["all closed"]
    for _ in range(100):  # the router closes its side a moment after ours
        if side.num_fds <= num_fds:
            break
        await asyncio.sleep(0.05)
    left = side.num_fds - num_fds
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
    parser.add_argument("--clients", type=int, default=16, help="that ask both")
    parser.add_argument("--period-s", type=float, default=0.25, help="of each, at each side")
    parser.add_argument("--rounds", type=int, default=4, help="crowds, to either side by turns")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn without a crowd")
    parser.add_argument("--grace-s", type=float, default=12.0, help="of the router")
    given = parser.parse_args()
    is_well = True
    for face in ("http", "tcp") if given.face == "both" else (given.face,):
        with router(face, given.grace_s) as one, router(face, given.grace_s) as other:
            is_well &= asyncio.run(run(face, [one, other], given))
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
