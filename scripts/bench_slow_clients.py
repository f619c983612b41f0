#!/usr/bin/env python3
"""What slow clients cost the others: 2,000 idle and 200 dribbling connections beside real requests.

    scripts/bench_slow_clients.py            # HTTP, then raw TCP
    scripts/bench_slow_clients.py --face tcp --idle 500 --dribbling 50 --grace-s 5

Starts a router with hash workers.  Some clients ask all the time, alone first, then beside the slow
ones: from the first of those connecting until the router has closed them all.  Prints both p99,
whether every slow connection was closed by its timer, and the router's file descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wire.aio.tcp import connect
from wire.frames import ANY_RANK, DecodeDone, DecodeRequest, Error, PrefillRequest
from wire.options import Options
from wire.payloads import encode_prompt

ROOT = Path(__file__).resolve().parent.parent
PROMPT, NUM_TOKENS = list(range(1, 33)), 8
START_S = 120.0
# A byte at a time, each legal where it stands.
DRIBBLE = {"http": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-slow: ", "tcp": bytes([30, 0, 0, 0])}

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


async def measure(clients: list[Ask], is_over: Callable[[], bool], pause_s: float) -> list[float]:
    """Ask from every client until it is over; return the seconds of each request, sorted."""
    seconds: list[float] = []

    async def go_on(ask: Ask) -> None:
        while not is_over():
            begin = time.perf_counter()
            await ask()
            seconds.append(time.perf_counter() - begin)
            await asyncio.sleep(pause_s)

    await asyncio.gather(*map(go_on, clients))
    return sorted(seconds)


class Slow:
    """The slow connections; `num_open` of them have not been closed by the router."""

    def __init__(self, place: Place, dribble: bytes, num_idle: int, num_dribbling: int) -> None:
        self.num_open = num_idle + num_dribbling
        self.num_refused = 0
        self._place, self._dribble = place, dribble
        self._num_idle, self._num_dribbling = num_idle, num_dribbling

    async def run(self, interval_s: float) -> None:
        """Connect a few at a time, dribble, and return when all have been closed."""
        tasks = []
        for index in range(self._num_idle + self._num_dribbling):
            data = b"" if index < self._num_idle else self._dribble
            tasks.append(asyncio.create_task(self._one(data, interval_s)))
            if index % 10 == 9:
                await asyncio.sleep(0.02)
        await asyncio.gather(*tasks)

    async def _one(self, data: bytes, interval_s: float) -> None:
        try:
            reader, writer = await asyncio.open_connection(self._place.host, self._place.port)
        except OSError:
            self.num_refused += 1
            return
        closed = asyncio.create_task(reader.read())
        for byte in data:
            writer.write(bytes([byte]))
            done, _ = await asyncio.wait([closed], timeout=interval_s)
            if done:
                break
        try:
            await closed
        except ConnectionError:
            pass
        self.num_open -= 1
        writer.close()


def quantile(seconds: list[float], share: float) -> float:
    return seconds[min(int(share * len(seconds)), len(seconds) - 1)] * 1e3


async def run(face: str, place: Place, given: argparse.Namespace) -> bool:
    make_client = http_client if face == "http" else tcp_client
    clients = [await until_served(make_client, place) for _ in range(given.clients)]
    num_fds = place.num_fds
    alone_until = time.monotonic() + given.seconds
    alone = await measure(clients, lambda: time.monotonic() > alone_until, given.pause_s)
    slow = Slow(place, DRIBBLE[face], given.idle, given.dribbling)
    task = asyncio.create_task(slow.run(given.interval_s))
    beside = await measure(clients, task.done, given.pause_s)
    await task
    for _ in range(100):  # the router closes its side a moment after ours
        if place.num_fds <= num_fds:
            break
        await asyncio.sleep(0.05)
    left = place.num_fds - num_fds
    print(
        f"{face}: {len(alone)} requests alone, {len(beside)} beside {given.idle} idle and "
        f"{given.dribbling} dribbling connections"
    )
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        was, now = quantile(alone, share), quantile(beside, share)
        print(f"  {name} {was:.2f} ms alone, {now:.2f} ms beside: {now / was - 1:+.1%}")
    print(
        f"  slow connections refused {slow.num_refused}, not closed by the router "
        f"{slow.num_open}; file descriptors over the baseline: {left}"
    )
    return not slow.num_open and not slow.num_refused and left <= 0


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--face", choices=("http", "tcp", "both"), default="both")
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--dribbling", type=int, default=200)
    parser.add_argument("--interval-s", type=float, default=5.0, help="between dribbled bytes")
    parser.add_argument("--clients", type=int, default=4, help="that ask all the time")
    parser.add_argument("--pause-s", type=float, default=0.01, help="of each between two requests")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the measurement alone")
    parser.add_argument("--grace-s", type=float, default=12.0, help="of the router")
    given = parser.parse_args()
    is_well = True
    for face in ("http", "tcp") if given.face == "both" else (given.face,):
        with router(face, given.grace_s) as place:
            is_well &= asyncio.run(run(face, place, given))
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
