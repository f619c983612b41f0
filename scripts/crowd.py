#!/usr/bin/env python3
"""A crowd of slow connections in a process of its own: bare sockets, so that it costs little CPU.

    scripts/crowd.py 127.0.0.1 8000 --face http --idle 2000 --dribbling 200 --interval-s 5

Opens the connections at `--rate`, sends a byte of an unfinished request on each dribbling one
every `--interval-s`, and waits until the other side has closed them all.  Prints a JSON line at
each turn, with the monotonic clock, which all processes of a machine share:

    {"turn": "connected" | "first closed" | "all closed", "at": s, "refused": n}
"""

from __future__ import annotations

import argparse
import json
import resource
import select
import socket
import sys
import time
from collections import deque
from typing import Final

# A byte at a time, each legal where it stands.
DRIBBLE: Final = {
    "http": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-slow: " + b"y" * 64,
    "tcp": bytes([30, 0, 0, 0]),
}
# Whoever is not closed by then is reported as left.
GIVE_UP_S: Final = 150.0


class Crowd:
    """The connections, by file descriptor."""

    def __init__(self, host: str, port: int, dribble: bytes, interval_s: float) -> None:
        self.num_refused = 0
        self._address = (host, port)
        self._dribble, self._interval_s = dribble, interval_s
        self._open: dict[int, socket.socket] = {}
        self._epoll = select.epoll()
        # (when, connection, index of the byte); equal intervals keep it in order.
        self._due: deque[tuple[float, socket.socket, int]] = deque()
        self._is_closing = False

    def connect(self, num_idle: int, num_dribbling: int, rate: float) -> None:
        """Open them all at `rate` a second, the dribbling ones evenly among the idle ones."""
        num = num_idle + num_dribbling
        begin = time.monotonic()
        for index in range(num):
            self._serve(begin + index / rate)
            is_dribbling = (index + 1) * num_dribbling // num > index * num_dribbling // num
            self._connect_one(is_dribbling)

    def wait(self) -> int:
        """Dribble until all are closed; return how many are not, `GIVE_UP_S` later."""
        give_up = time.monotonic() + GIVE_UP_S
        while self._open and time.monotonic() < give_up:
            self._serve(time.monotonic() + 0.05)
        return len(self._open)

    def _connect_one(self, is_dribbling: bool) -> None:
        try:
            connection = socket.create_connection(self._address)
        except OSError:
            self.num_refused += 1
            return
        connection.setblocking(False)
        self._open[connection.fileno()] = connection
        self._epoll.register(connection, select.EPOLLIN)
        if is_dribbling:
            self._due.append((time.monotonic(), connection, 0))

    def _serve(self, until: float) -> None:
        """Send what is due and hear of ends, until that moment."""
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                self._send(*self._due.popleft())
            wait_s = until - now
            for fd, _ in self._epoll.poll(max(wait_s, 0.0)):
                self._read(fd)
            if wait_s <= 0.0:
                return

    def _send(self, due: float, connection: socket.socket, index: int) -> None:
        if index == len(self._dribble) or connection.fileno() < 0:
            return
        try:
            connection.send(self._dribble[index : index + 1])
        except OSError:
            return  # the next read says why
        self._due.append((due + self._interval_s, connection, index + 1))

    def _read(self, fd: int) -> None:
        connection = self._open[fd]
        try:
            if connection.recv(65536):
                return  # words of refusal; the end follows
        except OSError:
            pass
        if not self._is_closing:
            self._is_closing = True
            say("first closed")
        del self._open[fd]
        connection.close()


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
    crowd = Crowd(given.host, given.port, DRIBBLE[given.face], given.interval_s)
    crowd.connect(given.idle, given.dribbling, given.rate)
    say("connected", refused=crowd.num_refused)
    left = crowd.wait()
    say("all closed", refused=crowd.num_refused, left=left)
    sys.exit(bool(left or crowd.num_refused))


if __name__ == "__main__":
    main()
