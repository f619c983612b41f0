"""A router of one process that hands over to a successor, and then to the next."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from router.config import Config
from router.processes.alone import serve_alone
from tests.router.children import is_gone, until
from wire.process.model import fingerprint, locate

pytestmark = pytest.mark.timeout(360)  # several starts each
ARGV = ("--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--log-level", "error")


class Site:
    """`serve_alone` in this process, what it has logged, and a client with a new connection each
    time."""

    def __init__(
        self,
        directory: Path,
        argv: tuple[str, ...],
        bus: str,
        capture: structlog.testing.LogCapture,
    ) -> None:
        self.stop = asyncio.Event()
        self.ready = directory / "ready"
        config = Config(
            http="127.0.0.1:0", tcp="127.0.0.1:0", bus=bus, ready_file=self.ready, drain_s=1.0
        )
        path = locate("demo")
        self.serving = asyncio.create_task(
            serve_alone(config, argv, path, fingerprint(path), self.stop)
        )
        self._capture = capture

    def client(self) -> httpx.AsyncClient:
        url = json.loads(self.ready.read_text())["http"]
        return httpx.AsyncClient(base_url=url, timeout=120, trust_env=False)

    async def ask(self, method: str, path: str) -> Any:
        async with self.client() as client:
            return (await client.request(method, path)).json()

    async def pids(self) -> list[int]:
        router = (await self.ask("GET", "/v1/cluster"))["router"]
        return [each["pid"] for each in router.get("processes", [])]

    def said(self, event: str) -> list[Any]:
        return [line for line in self._capture.entries if line["event"] == event]


@asynccontextmanager
async def alone(
    directory: Path, argv: tuple[str, ...] = ARGV, bus: str = "tcp://127.0.0.1:0"
) -> AsyncIterator[Site]:
    capture = structlog.testing.LogCapture()
    before = structlog.get_config()["processors"]
    structlog.configure(processors=[capture])
    try:
        site = Site(directory, argv, bus, capture)
        await until(site.ready.exists)
        try:
            yield site
        finally:
            site.stop.set()
            assert await site.serving == 0
    finally:
        structlog.configure(processors=before)


async def test_one_successor_follows_another(tmp_path: Path) -> None:
    async with alone(tmp_path) as site:
        assert await site.pids() == []
        assert await site.ask("POST", "/v1/router/restart") == {"status": "restarted"}
        first = (await site.pids())[0]
        assert first != os.getpid()
        assert await site.ask("POST", "/v1/router/restart") == {"status": "restarted"}
        second = (await site.pids())[0]
        assert second not in (first, os.getpid())
        await until(lambda: is_gone(first))
        await until(lambda: site.said("a successor serves; finishing"))
        assert await site.pids() == [second], "this process has finished its clients"
        os.kill(second, signal.SIGKILL)
        third = (await site.pids())[0]  # the connection waits for it
        assert third != second
    assert is_gone(third)


async def test_a_process_that_is_stuck_while_it_finishes_its_clients_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("STUCK_S", 4.0), ("REPORT_S", 0.2), ("STATE_S", 0.2)):
        monkeypatch.setattr(f"router.processes.supervisor.{name}", seconds)
    async with alone(tmp_path) as site:
        assert await site.ask("POST", "/v1/router/restart") == {"status": "restarted"}
        async with site.client() as client:
            row = (await client.get("/v1/cluster")).json()["router"]["processes"][0]
            assert await site.ask("POST", "/v1/router/restart") == {"status": "restarted"}
            os.kill(row["pid"], signal.SIGSTOP)  # it waits for the client above
            await until(lambda: is_gone(row["pid"]))
        assert site.said("router process is stuck")


async def test_the_only_process_goes_on_if_its_successor_cannot_start(tmp_path: Path) -> None:
    async with alone(tmp_path, (*ARGV, "--drain-s", "never")) as site:
        for _ in range(2):
            answer = await site.ask("POST", "/v1/router/restart")
            assert "ended with status 78 before it served" in answer["error"]["message"]
            assert await site.pids() == []
    assert not site.said("a part of the router broke")


async def test_a_bus_of_a_file_is_not_handed_over(tmp_path: Path) -> None:
    async with alone(tmp_path, bus=f"ipc://{tmp_path}/bus") as site:
        answer = await site.ask("POST", "/v1/router/restart")
        assert "--bus tcp://HOST:PORT" in answer["error"]["message"]
