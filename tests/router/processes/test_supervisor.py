"""The parent of real router processes: who is ended, who is started again, and how it all ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from router.config import Config
from router.processes.supervisor import PARENT_ONLY, serve_by_several
from tests.router.children import is_gone, until
from wire.process.children import start_child

pytestmark = pytest.mark.timeout(360)  # several starts each
FLAGS = ("--processes", "2", "--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--log-level")
ARGV = (*FLAGS, "error", "--bus")


class Parent:
    """`serve_by_several` in this process, and what it has logged."""

    def __init__(self, directory: Path, bus: str, capture: structlog.testing.LogCapture) -> None:
        self.stop = asyncio.Event()
        self.ready = directory / "ready"
        config = Config(
            processes=2, http="127.0.0.1:0", tcp="127.0.0.1:0", bus=bus, ready_file=self.ready
        )
        self.serving = asyncio.create_task(serve_by_several(config, [*ARGV, bus], self.stop))
        self._capture = capture

    def pids(self, index: int) -> list[int]:
        """Of one of the processes, all its lives."""
        return [
            line["pid"]
            for line in self._capture.entries
            if line["event"] == "router process started" and line["process"] == index
        ]

    async def die(self, index: int) -> None:
        """Kill one of the processes, and wait for the next in its place."""
        lives = self.pids(index)
        os.kill(lives[-1], signal.SIGKILL)
        await until(lambda: self.pids(index) != lives)

    def said(self, event: str, what: str = "process") -> list[Any]:
        return [line[what] for line in self._capture.entries if line["event"] == event]


@asynccontextmanager
async def parent(directory: Path, bus: str = "tcp://127.0.0.1:0") -> AsyncIterator[Parent]:
    capture = structlog.testing.LogCapture()
    before = structlog.get_config()["processors"]
    structlog.configure(processors=[capture])
    try:
        started = Parent(directory, bus, capture)
        try:
            yield started
        finally:
            started.stop.set()
            await started.serving
    finally:
        structlog.configure(processors=before)


def environ_of(pid: int) -> list[str]:
    return [each.split("=")[0] for each in Path(f"/proc/{pid}/environ").read_text().split("\0")]


async def test_a_terminated_process_is_restarted_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PARENT_ONLY:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("router.processes.supervisor.ANSWER_S", 60.0)
    children = list[asyncio.subprocess.Process]()

    async def start(*of: Any) -> asyncio.subprocess.Process:
        children.append(child := await start_child(*of))
        return child

    monkeypatch.setattr("router.processes.supervisor.start_child", start)
    async with parent(tmp_path) as it:
        await until(it.ready.exists)
        environ = environ_of(it.pids(0)[0])
        assert not [name for name in PARENT_ONLY if name in environ]
        ready = it.ready.read_text()
        assert len(set(json.loads(ready)["bus"].split(","))) == 2
        os.kill(it.pids(1)[0], signal.SIGTERM)
        await until(lambda: len(it.pids(1)) == 2)
        assert len(it.pids(0)) == 1 and it.ready.read_text() == ready
    assert it.serving.result() == 0
    assert [child.returncode for child in children[:2]] == [0, 0], "each had time to end"
    assert all(is_gone(pid) for index in (0, 1) for pid in it.pids(index))


async def test_counters_do_not_fall_however_often_a_process_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.processes.supervisor.MIN_PAUSE_S", 0.01)
    # Else one that has to wait for a core is counted as it was before.
    monkeypatch.setattr("router.processes.supervisor.ANSWER_S", 60.0)

    counter = 'baton_http_requests_total{endpoint="completions"'

    async def ask(path: str, **body: object) -> str:
        # A connection each: they reach both.
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            return (await (client.post(path, json=body) if body else client.get(path))).text

    async def counted() -> list[str]:
        lines = (await ask("/metrics")).splitlines()
        return [line for line in lines if line.startswith(counter)]

    async with parent(tmp_path) as it:
        await until(it.ready.exists)
        url = json.loads(it.ready.read_text())["http"]
        for _ in range(12):
            await ask("/v1/completions", prompt=[1, 2], max_tokens=1)
        before = await counted()
        assert [float(line.split()[-1]) for line in before] == [12.0]
        await it.die(1)
        assert await counted() == before
        await it.die(1)
        assert await counted() == before


async def test_a_stuck_process_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A second process may wait for a core for longer than a look waits for it.
    for name, seconds in (("STUCK_S", 4.0), ("REPORT_S", 0.2), ("STATE_S", 0.2)):
        monkeypatch.setattr(f"router.processes.supervisor.{name}", seconds)
    async with parent(tmp_path) as it:
        await until(it.ready.exists)
        os.kill(it.pids(0)[0], signal.SIGSTOP)
        await until(lambda: len(it.pids(0)) == 2)
        assert set(it.said("router process is stuck")) == {0}
        assert len(it.pids(1)) == 1
        os.kill(it.pids(1)[0], signal.SIGSTOP)
        await until(lambda: 1 in it.said("router process is stuck"))
        # It has time to show its stacks.
        monkeypatch.setattr("router.processes.supervisor.STUCK_S", 600.0)
        os.kill(it.pids(1)[0], signal.SIGCONT)  # it can do what SIGABRT makes it do
        await until(lambda: len(it.pids(1)) == 2)
    assert it.said("child process ended", "status") == [-signal.SIGKILL, -signal.SIGABRT]


async def test_a_process_that_dies_before_its_successor_serves_is_replaced(tmp_path: Path) -> None:
    async with parent(tmp_path) as it:
        await until(it.ready.exists)
        os.kill(os.getpid(), signal.SIGUSR2)
        await until(lambda: len(it.pids(0)) == 2)
        os.kill(it.pids(0)[0], signal.SIGKILL)
        await until(lambda: it.said("router process restarted") == [0, 1])
        assert [len(it.pids(index)) for index in (0, 1)] == [2, 2]
    assert it.serving.result() == 0


async def test_a_process_is_started_again_if_it_and_its_successor_die(tmp_path: Path) -> None:
    async with parent(tmp_path) as it:
        await until(it.ready.exists)
        os.kill(os.getpid(), signal.SIGUSR2)
        await until(lambda: len(it.pids(0)) == 2)
        for pid in it.pids(0):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len(it.pids(0)) == 3)
        assert it.said("the successor failed; the old goes on") == [0]
    assert it.serving.result() == 0


async def test_a_process_that_cannot_start_ends_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second bus has the port after the first one's, and here somebody has it."""
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bus = f"tcp://127.0.0.1:{taken.getsockname()[1] - 1}"
        async with parent(tmp_path, bus) as it:
            assert await it.serving == 1
            assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not it.ready.exists()
    assert all(is_gone(pid) for index in (0, 1) for pid in it.pids(index))
