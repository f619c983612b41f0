"""The launcher: routers and other programs to be measured, as processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

ROOT: Final = Path(__file__).resolve().parent.parent.parent
START_S: Final = 120.0


@dataclass(frozen=True)
class Server:
    """A process that listens; its addresses by "http" and "tcp"."""

    addresses: dict[str, tuple[str, int]]
    pid: int
    buses: tuple[str, ...] = ()

    @property
    def http(self) -> tuple[str, int]:
        return self.addresses["http"]

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.pid)

    @property
    def family(self) -> list[psutil.Process]:
        """The process and all that it started."""
        return [self.process, *self.process.children(recursive=True)]

    def wait_until_ready(self) -> None:
        """Wait until a router has its workers."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with socket.create_connection(self.http) as connection:
                connection.sendall(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                if b" 200 " in connection.recv(4096):
                    return
            time.sleep(0.1)
        raise SystemExit("the router has no workers")


@contextmanager
def router(*flags: str, root: Path = ROOT) -> Iterator[Server]:
    """A router of the checkout at `root`, on ports that are free."""
    endpoints = ("--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--bus", "tcp://127.0.0.1:0")
    with started("router", "--log-level", "error", *endpoints, *flags, root=root) as server:
        if "--local" in flags:
            server.wait_until_ready()
        yield server


@contextmanager
def started(*module: str, root: Path = ROOT) -> Iterator[Server]:
    """A module with its flags; it takes `--ready-file` as a router does."""
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready"
        with running("-m", *module, "--ready-file", str(ready), root=root) as process:
            deadline = time.monotonic() + START_S
            while not ready.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            urls = json.loads(ready.read_text())
            buses = tuple(urls.pop("bus").split(","))
            yield Server({face: _address(url) for face, url in urls.items()}, process.pid, buses)


@contextmanager
def running(
    *arguments: str, python: str = sys.executable, root: Path = ROOT, is_quiet: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process, which is ended in any case."""
    output = subprocess.DEVNULL if is_quiet else None
    process = subprocess.Popen([python, *arguments], cwd=root, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _address(url: str) -> tuple[str, int]:
    host, port = url.rpartition("//")[2].rsplit(":", 1)
    return host, int(port)


class Cpu:
    """The CPU seconds, as user and as system, that processes use from now on."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._processes = list(processes)
        self._before = self._now()

    def used(self) -> tuple[float, float]:
        total, user, system = (b - a for a, b in zip(self._before, self._now(), strict=True))
        # The kernel counts the sum exactly, and samples how it divides.
        share = user / (user + system or 1.0)
        return total * share, total * (1 - share)

    def _now(self) -> tuple[float, float, float]:
        times = [process.cpu_times() for process in self._processes]
        # The clock of another process, as clock_getcpuclockid(3) makes it.
        clocks = [time.clock_gettime((~each.pid << 3) | 2) for each in self._processes]
        return sum(clocks), sum(each.user for each in times), sum(each.system for each in times)


def share_cores(routers: Iterable[int], workers: Iterable[int]) -> None:
    """Put all threads of the routers on one core and those of the workers on another.

    Two routers that are compared need the same luck: left to the scheduler, one can sit for seconds
    on a core that another process needs too.
    """
    cores = sorted(os.sched_getaffinity(0))
    for core, pids in ((cores[0], routers), (cores[-1], workers)):
        for pid in pids:
            for thread in psutil.Process(pid).threads():
                os.sched_setaffinity(thread.id, {core})
