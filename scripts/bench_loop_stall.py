#!/usr/bin/env python3
"""Measure how long large request bodies stall the event loop, and thus other clients.

    scripts/bench_loop_stall.py                          # 32,768 tokens of context
    scripts/bench_loop_stall.py --max-model-len 500000   # a text of 2 MB is tokenized

Starts a router with hash workers.  A separate process polls `/livez` over one connection, while
bodies of 1 to 16 MB are posted, two of each at a time.  The slowest response is the stall.  The
minimum of several rounds counts, because other load on the machine can only increase it; the row
without a body shows how much other load there is.  RSS is the memory of the router after the row.
`--root` measures another checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.command.bench.connection import CHAT, COMPLETIONS, open_http
from router.command.bench.table import Table
from scripts.bench.processes import ROOT, Server, router

NUM_AT_A_TIME: Final = 2
MB: Final = 1 << 20


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield the name, path and content of each body to post."""
    words = "the quick brown fox jumps over the lazy dog and "
    for size in (1, 2, 4, 16):
        # A little less text, so that the whole body has this size.
        text = (words * (size * MB // len(words)))[: size * MB - 100]
        for name, prompt in (("words", text), ("one letter", "a" * len(text))):
            body = {"prompt": prompt, "max_tokens": 1}
            yield f"{size} MB of {name}", COMPLETIONS, json.dumps(body).encode()
    message = {"role": "user", "content": "Hello"}
    for number in (5_000, 100_000):
        chat = {"messages": [message] * number, "max_tokens": 1}
        yield f"{number:,} messages", CHAT, json.dumps(chat).encode()
    for number in (200_000, 2_000_000):
        ids = {"prompt": [7] * number, "max_tokens": 1}
        yield f"{number:,} ids", COMPLETIONS, json.dumps(ids, separators=(",", ":")).encode()
    empty = b'{"prompt":"a","tools":[' + b",".join([b"[]"] * 1_300_000) + b"]}"
    yield "1,300,000 empty lists", CHAT, empty


def poll(host: str, port: int, is_over: Event, answer: Any) -> None:
    """Poll `/livez` until `is_over` is set, and send the longest response time to `answer`."""

    async def slowest() -> float:
        connection, longest_s = await open_http(host, port), 0.0
        answer.send(None)  # polling has started
        while not is_over.is_set():
            await connection.request("GET", "/livez")
            longest_s = max(longest_s, time.monotonic() - connection.sent_at)
            await asyncio.sleep(0.001)
        return longest_s

    answer.send(asyncio.run(slowest()))


async def post(server: Server, path: str, body: bytes) -> str:
    """Post a body; return the status of the response, or "-" if there was none."""
    connection = await open_http(*server.http)
    try:
        await connection.request("POST", path, body)
    except OSError:
        pass  # the response may have come before
    connection.transport.abort()
    return str(connection.status) if connection.chunks else "-"


async def post_all(server: Server, path: str, body: bytes | None) -> list[str]:
    if body is None:
        await asyncio.sleep(2.0)
        return []
    return await asyncio.gather(*[post(server, path, body) for _ in range(NUM_AT_A_TIME)])


def measure(server: Server, path: str, body: bytes | None) -> tuple[float, float, list[str]]:
    """Return the stall and the time until the last response, in seconds, and all statuses."""
    # During a long stall the router loses its workers, and would then refuse the next body.
    server.wait_until_ready()
    context = multiprocessing.get_context("spawn")
    is_over = context.Event()
    here, there = context.Pipe()
    poller = context.Process(target=poll, args=(*server.http, is_over, there))
    poller.start()
    there.close()  # so that `recv` raises EOFError if the process dies
    here.recv()
    begin = time.monotonic()
    statuses = asyncio.run(post_all(server, path, body))
    seconds = time.monotonic() - begin
    time.sleep(0.05)  # include the time to free memory after the response
    is_over.set()
    stall = here.recv()
    poller.join()
    return stall, seconds, statuses


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what large bodies cost the others.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to run")
    parser.add_argument("--max-model-len", type=int, help="context length; none: the hash worker's")
    parser.add_argument("--rounds", type=int, default=3, help="of each body")
    args = parser.parse_args()
    flags = ["--local", "1,1", "--executor", "hash"]
    if args.max_model_len is not None:
        flags += ["--worker-args", f"--max-model-len {args.max_model_len}"]
    with router(*flags, root=args.root.resolve()) as server:
        table = Table(
            *("body:<24", "status:>10", "answer s:>10.2f", "stall ms:>10.0f", "RSS MB:>9.0f")
        )
        for name, path, body in [("(none)", "", None), *bodies()]:
            rounds = [measure(server, path, body) for _ in range(args.rounds)]
            stall, seconds, statuses = min(rounds)
            rss = server.process.memory_info().rss / MB
            table.row(name, " ".join(statuses), seconds, 1000 * stall, rss)
    return 0


if __name__ == "__main__":
    sys.exit(main())
