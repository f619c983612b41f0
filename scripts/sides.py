"""Routers to be measured: their processes, and two with a worker pair each on the same cores.

Where two are compared they need the same luck.  Left to the scheduler one side can sit for seconds
on a core that somebody else needs too.  Both routers share one core here and all their workers
another.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

ROOT: Final = Path(__file__).resolve().parent.parent
START_S: Final = 120.0


@dataclass(frozen=True)
class Side:
    """Where the router listens, and which process it is."""

    host: str
    port: int
    pid: int

    @property
    def workers(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]

    @property
    def num_fds(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    @property
    def cpu_s(self) -> float:
        """What the router has used, without its workers."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


@contextmanager
def router(face: str, grace_s: float) -> Iterator[Side]:
    """A router with one prefill and one decode worker."""
    flags = ["--local", "1,1", "--executor", "hash", "--grace-s", str(grace_s)]
    with listening(flags) as (addresses, pid, _):
        yield Side(*addresses[face], pid)


# Where clients reach a router, by face, its process, and its buses.
Listening = tuple[dict[str, tuple[str, int]], int, list[str]]


def listening(flags: list[str], root: Path = ROOT) -> AbstractContextManager[Listening]:
    """A router's process, of the checkout at `root`."""
    endpoints = ["--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--bus", "tcp://127.0.0.1:0"]
    return started(["router", "--log-level", "error", *endpoints, *flags], root)


@contextmanager
def started(module: list[str], root: Path = ROOT) -> Iterator[Listening]:
    """A module and its flags, as a process that takes `--ready-file` as a router does."""
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready"
        command = [sys.executable, "-m", *module, "--ready-file", str(ready)]
        with ended(subprocess.Popen(command, cwd=root)) as process:
            deadline = time.monotonic() + START_S
            while not ready.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            urls = json.loads(ready.read_text())
            buses = urls.pop("bus").split(",")
            yield {face: _address(url) for face, url in urls.items()}, process.pid, buses


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End a process in any case."""
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def wait_until_served(address: tuple[str, int]) -> None:
    """Wait until the router has its workers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.create_connection(address) as connection:
            connection.sendall(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            if b" 200 " in connection.recv(4096):
                return
        time.sleep(0.1)
    raise SystemExit("the router has no workers")


def _address(url: str) -> tuple[str, int]:
    host, port = url.rpartition("//")[2].rsplit(":", 1)
    return host, int(port)


def share_cores(routers: Iterable[int], workers: Iterable[int]) -> None:
    """Put these processes with all their threads on one core, those on another."""
    cores = sorted(os.sched_getaffinity(0))
    for core, pids in ((cores[0], routers), (cores[-1], workers)):
        for pid in pids:
            for thread in psutil.Process(pid).threads():
                os.sched_setaffinity(thread.id, {core})
