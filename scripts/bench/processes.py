"""Launches routers and other programs to be measured, as separate processes."""

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
    """A running server; the keys of `addresses` are "http" and "tcp"."""

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
        """The process and all its descendants."""
        return [self.process, *self.process.children(recursive=True)]

    def wait_until_ready(self) -> None:
        """Wait until a router is ready."""
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
    """Run a router of the checkout at `root`, on free ports."""
    endpoints = ("--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--bus", "tcp://127.0.0.1:0")
    with started("router", "--log-level", "error", *endpoints, *flags, root=root) as server:
        if "--local" in flags:
            server.wait_until_ready()
        yield server


@contextmanager
def started(*module: str, root: Path = ROOT) -> Iterator[Server]:
    """Run a module with flags; the module must support `--ready-file` as a router does."""
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
    """Run a Python process, and terminate it on exit."""
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
    """Measures the user and system CPU seconds that processes use from its creation on."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._processes = list(processes)
        self._before = self._now()

    def used(self) -> tuple[float, float]:
        total, user, system = (b - a for a, b in zip(self._before, self._now(), strict=True))
        # The kernel counts the total exactly, but only samples the user and system times.
        share = user / (user + system or 1.0)
        return total * share, total * (1 - share)

    def _now(self) -> tuple[float, float, float]:
        times = [process.cpu_times() for process in self._processes]
        # The id of the CPU clock of another process, as in clock_getcpuclockid(3).
        clocks = [time.clock_gettime((~each.pid << 3) | 2) for each in self._processes]
        return sum(clocks), sum(each.user for each in times), sum(each.system for each in times)


def share_cores(routers: Iterable[int], workers: Iterable[int]) -> None:
    """Pin all threads of the routers to one core and those of the workers to another.

    This gives two routers that are compared equal conditions: otherwise one may run for seconds on
    a core that another process uses too.
    """
    cores = sorted(os.sched_getaffinity(0))
    for core, pids in ((cores[0], routers), (cores[-1], workers)):
        for pid in pids:
            for thread in psutil.Process(pid).threads():
                os.sched_setaffinity(thread.id, {core})
