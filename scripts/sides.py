"""Two routers with a worker pair each, to be compared: the same cores, so the same luck.

Left to the scheduler one side can sit for seconds on a core that somebody else needs too.  Both
routers share one core here and all their workers another.
"""

from __future__ import annotations

import json
import os
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
            yield Side(host, int(port), process.pid)
        finally:
            process.terminate()
            process.wait(60)


def share_cores(routers: Iterable[int], workers: Iterable[int]) -> None:
    """Put these processes with all their threads on one core, those on another."""
    cores = sorted(os.sched_getaffinity(0))
    for core, pids in ((cores[0], routers), (cores[-1], workers)):
        for pid in pids:
            for thread in psutil.Process(pid).threads():
                os.sched_setaffinity(thread.id, {core})
