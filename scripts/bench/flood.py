#!/usr/bin/env python3
"""Floods a router with expensive requests of one API key, from a process with little CPU use.

    tail -1 api_keys | scripts/bench/flood.py 127.0.0.1 8000 schemas --seconds 10

Reads the API key from stdin, opens the connections of the load, and sends one request after another
on each.  Prints "begun" when the first request on every connection was sent.  Stops at SIGTERM or
after `--seconds`, and aborts pending requests.  The last line is JSON with the duration, the number
of responses by status, and the first error:

    {"seconds": 10.0, "answers": {"200": 97, "429": 3}, "error": "…"}
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from router.command.bench.connection import CHAT, COMPLETIONS, HttpConnection, open_http

# The pause after an error, so that a refused client does not use CPU for nothing.
PAUSE_S: Final = 0.05
WORDS: Final = "the quick brown fox jumps over the lazy dog and "
# Every text has very many derivations: a mask takes milliseconds, longer with each token.
AMBIGUOUS: Final = "start: s\ns: s s | /[ -~]/"

# Returns the path and the body of a request; each number gives a different body.
Request = Callable[[int], tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Load:
    """The request that every connection repeats."""

    connections: int
    request: Request
    # Whether the client disconnects at the first token of each response.
    is_aborted: bool = False


def schema(number: int) -> tuple[str, dict[str, Any]]:
    """Return a request with a new JSON schema of 50 KB, which takes 0.15 s to validate."""
    addresses = {"type": "array", "items": {"type": "string", "format": "ipv6"}}
    properties = {f"address_{number:06}_{index:03}": addresses for index in range(480)}
    nested = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    body = {"prompt": "Once", "max_tokens": 4, "structured_outputs": {"json": nested}}
    return COMPLETIONS, body


def large_body(number: int) -> tuple[str, dict[str, Any]]:
    """Return a text of 100 KB, either to tokenize or as a chat truncated to 64 tokens."""
    text = f"{number} " + WORDS * (100_000 // len(WORDS))
    if number % 2:
        return "/tokenize", {"prompt": text}
    messages = [{"role": "user", "content": text}]
    return CHAT, {"messages": messages, "max_tokens": 4, "truncate_prompt_tokens": 64}


def opening(number: int) -> tuple[str, dict[str, Any]]:
    """Return a long streamed chat."""
    messages = [{"role": "user", "content": f"Tell story number {number}."}]
    return CHAT, {"messages": messages, "max_tokens": 500, "ignore_eos": True, "stream": True}


def choices(number: int) -> tuple[str, dict[str, Any]]:
    """Return a completion request with the maximum number of choices."""
    body = {"prompt": f"Once {number}", "n": 128, "max_tokens": 64, "ignore_eos": True}
    return COMPLETIONS, body


def scored(number: int) -> tuple[str, dict[str, Any]]:
    """Return a completion request with the top 20 logprobs of 1500 prompt tokens."""
    prompt = [3 + (number * 7919 + index * 31) % 1000 for index in range(1500)]
    return COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 20}


def ambiguous(number: int) -> tuple[str, dict[str, Any]]:
    """Return a completion request with 128 choices, constrained to an expensive grammar."""
    body = {"prompt": f"Once {number}", "n": 128, "max_tokens": 24, "temperature": 1.0}
    return COMPLETIONS, body | {"structured_outputs": {"grammar": AMBIGUOUS}}


LOADS: Final = {
    "schemas": Load(64, schema),
    "bodies": Load(64, large_body),
    "aborts": Load(24, opening, is_aborted=True),
    "choices": Load(2, choices),
    "prompt-logprobs": Load(16, scored),
    "grammar": Load(1, ambiguous),
}


class Flood:
    """Sends the requests of one API key."""

    def __init__(self, host: str, port: int, key: str, load: Load) -> None:
        self._address, self._load = (host, port, key), load
        self._numbers: Iterator[int] = itertools.count()
        self._answers = Counter[str]()
        self._error = ""

    async def run(self, seconds: float) -> dict[str, Any]:
        """Send requests until SIGTERM, for at most `seconds`; return the counts."""
        is_over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
        connections = [await open_http(*self._address) for _ in range(self._load.connections)]
        start = time.monotonic()
        tasks = [asyncio.create_task(self._repeat(connection)) for connection in connections]
        await asyncio.sleep(0)  # each task sends its first request
        print("begun", flush=True)
        over = asyncio.create_task(is_over.wait())
        await asyncio.wait([over, *tasks], timeout=seconds, return_when="FIRST_COMPLETED")
        passed = time.monotonic() - start
        for task in (over, *tasks):
            task.cancel()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(error, Exception):  # a bug, or the router is gone
                raise error
        return {"seconds": passed, "answers": self._answers, "error": self._error}

    async def _repeat(self, connection: HttpConnection) -> None:
        """Send one request after another on a connection, reopening it when it is closed."""
        while True:
            done = connection.post(*self._load.request(next(self._numbers)))
            try:
                await (self._first_token(connection, done) if self._load.is_aborted else done)
                status = connection.status
                self._answers[str(status)] += 1
            except ConnectionError:
                self._answers["closed"] += 1
                status = 0
            if status != 200:
                self._error = self._error or connection.body.decode()
                await asyncio.sleep(PAUSE_S)
            if self._load.is_aborted or connection.transport.is_closing():
                done.cancel()
                connection.transport.abort()
                connection = await open_http(*self._address)

    async def _first_token(self, connection: HttpConnection, done: asyncio.Future[None]) -> None:
        """Wait for the first token of a response or for its end."""
        await asyncio.wait([connection.first, done], return_when="FIRST_COMPLETED")
        if done.done():
            done.result()


async def run(given: argparse.Namespace) -> None:
    key = sys.stdin.readline().strip()
    flood = Flood(given.host, given.port, key, LOADS[given.load])
    print(json.dumps(await flood.run(given.seconds)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("load", choices=LOADS)
    parser.add_argument("--seconds", type=float, default=10.0, help="at most")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
