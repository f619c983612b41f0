#!/usr/bin/env python3
"""Opens many slow connections, from a separate process.

    scripts/bench/crowd.py 127.0.0.1 8000 --face http --idle 2000 --dribbling 200 --interval-s 5

Opens the connections at `--rate`.  On each dribbling connection, sends one byte of an incomplete
request every `--interval-s`; idle ones send nothing.  Waits until the server has closed all
connections, and prints a JSON line at each of these events, with the monotonic time:

    {"turn": "connected" | "first closed" | "all closed", "at": s, "refused": n}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from typing import Any, Final

import uvloop

# An incomplete request, which is sent one byte at a time.
DRIBBLE: Final = {
    "http": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-slow: " + b"y" * 64,
    "tcp": bytes([30, 0, 0, 0]),
}
# Connections that are open this long after the last connect are reported as `left`.
GIVE_UP_S: Final = 150.0


class Slow(asyncio.Protocol):
    """One connection, which sends its bytes slowly, or none."""

    def __init__(self, open_ones: set[Slow], dribble: bytes, interval_s: float) -> None:
        self._open_ones, self._dribble, self._interval_s = open_ones, dribble, interval_s

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._open_ones.add(self)
        self._send(0)

    def connection_lost(self, error: Exception | None) -> None:
        self._open_ones.remove(self)

    def _send(self, index: int) -> None:
        if index < len(self._dribble) and not self._transport.is_closing():
            self._transport.write(self._dribble[index : index + 1])
            loop = asyncio.get_running_loop()
            loop.call_later(self._interval_s, self._send, index + 1)


class Crowd:
    """All slow connections of this process."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._open_ones = set[Slow]()
        self._num_opened = self._num_refused = 0
        self._is_first_closed = False

    async def run(self) -> bool:
        """Open all connections and wait until they are closed; return whether any failed."""
        given, begin = self._given, time.monotonic()
        num = given.idle + given.dribbling
        for index in range(num):
            await asyncio.sleep(begin + index / given.rate - time.monotonic())
            # Spread the dribbling connections evenly among the idle ones.
            is_dribbling = (index + 1) * given.dribbling // num > index * given.dribbling // num
            await self._open(DRIBBLE[given.face] if is_dribbling else b"")
        say("connected", refused=self._num_refused)
        give_up = time.monotonic() + GIVE_UP_S
        while self._open_ones and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
            self._watch()
        say("all closed", refused=self._num_refused, left=len(self._open_ones))
        return bool(self._open_ones or self._num_refused)

    async def _open(self, dribble: bytes) -> None:
        slow = Slow(self._open_ones, dribble, self._given.interval_s)
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: slow, self._given.host, self._given.port)
            self._num_opened += 1
        except OSError:
            self._num_refused += 1
        self._watch()

    def _watch(self) -> None:
        if not self._is_first_closed and len(self._open_ones) < self._num_opened:
            self._is_first_closed = True
            say("first closed")


def say(turn: str, **facts: int) -> None:
    print(json.dumps({"turn": turn, "at": time.monotonic(), **facts}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--face", choices=tuple(DRIBBLE), required=True)
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--dribbling", type=int, default=200)
    parser.add_argument("--interval-s", type=float, default=5.0, help="between dribbled bytes")
    parser.add_argument("--rate", type=float, default=500.0, help="connections opened a second")
    given = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.exit(uvloop.run(Crowd(given).run()))


if __name__ == "__main__":
    main()
