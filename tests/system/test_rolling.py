"""`baton drain` and `baton restart` on whole clusters under load: no request fails."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cluster import ROOT, START_S, Cluster, until
from tests.faults.checks import problems
from tests.faults.clients import Record, TcpClient, ask_http
from tests.system.figures import figures_at
from tests.system.locked import Locked
from wire.options import Options
from wire.process.settings import EX_LEFT

NUM_TOKENS = 30
NUM_STREAMS = 12
# Clients that share two cores with a cluster are slow to speak.
SLOW = ("--grace-s", "60", "--worker-args", "--hash-step-ms 20")
BATON = "import sys; from router.command.main import main; sys.exit(main())"
CLIENT, ADMIN = "sk-client-0123456789abc", "sk-admin-0123456789abc"


async def baton(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command `baton` to its end."""
    command = [sys.executable, "-c", BATON, *args]
    run = subprocess.run
    return await asyncio.to_thread(
        run, command, cwd=ROOT, capture_output=True, text=True, timeout=2 * START_S
    )


class Load:
    """Streams that follow each other without a pause, half over HTTP and half over raw TCP.

    Each asker opens a new connection for every third request, and keeps it for the others.
    """

    def __init__(self, cluster: Cluster, num_streams: int) -> None:
        self._cluster = cluster
        self.num_streams = num_streams
        self._stop = asyncio.Event()
        self._numbers = itertools.count()
        self.records: list[Record] = []
        self.num_connections = 0

    def _record(self, face: str) -> Record:
        prompt = [next(self._numbers), 7, 9] * 20
        record = Record(prompt, Options(ignore_eos=True), NUM_TOKENS, face)
        self.records.append(record)
        return record

    async def _ask_http(self) -> None:
        while not self._stop.is_set():
            async with httpx.AsyncClient(
                base_url=self._cluster.http,
                headers=self._cluster.headers,
                timeout=60,
                trust_env=False,
                verify=False,
            ) as client:
                for _ in range(3):
                    await ask_http(client, self._record("http"))

    async def _ask_tcp(self) -> None:
        while not self._stop.is_set():
            client = await TcpClient.connect(*self._cluster.tcp)
            for _ in range(3):
                await client.ask(self._record("tcp"))
            await client.close()

    async def _connect(self) -> None:
        """Open connections one after another; each must be taken and answered."""
        host, port = self._cluster.http.removeprefix("http://").split(":")
        while not self._stop.is_set():
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            self.num_connections += 1
            await asyncio.sleep(0.005)

    async def until_more(self, count: int) -> None:
        """Wait until so many more requests have been sent."""
        goal = len(self.records) + count
        await asyncio.to_thread(until, lambda: len(self.records) >= goal, "they go on", START_S)

    async def run(self) -> None:
        """Keep `num_streams` streams open until `stop`."""
        # With keys, all over HTTP.
        pair = [self._ask_http, self._ask_http if self._cluster.headers else self._ask_tcp]
        await asyncio.gather(self._connect(), *[ask() for ask in pair * (self.num_streams // 2)])

    def stop(self) -> None:
        self._stop.set()


@asynccontextmanager
async def loaded(cluster: Cluster, num_streams: int = NUM_STREAMS) -> AsyncIterator[Load]:
    """Load a cluster; at the end, every answer must have been right."""
    load = Load(cluster, num_streams)
    running = asyncio.create_task(load.run())
    await load.until_more(num_streams)
    try:
        yield load
        await load.until_more(num_streams)
    finally:
        load.stop()
        await running
    assert problems(load.records) == []
    await asyncio.to_thread(cluster.until_idle)


def epochs(cluster: Cluster) -> dict[str, int]:
    """The workers that serve; on a loaded machine a heartbeat may be late, and one is suspect."""
    rows = [row for row in cluster.status()["workers"] if row["state"] in {"ready", "suspect"}]
    return {f"{row['role']}-{row['rank']}": row["epoch"] for row in rows}


def are_new(before: dict[str, int], after: dict[str, int]) -> bool:
    return before.keys() == after.keys() and not set(before.values()) & set(after.values())


@pytest.mark.parametrize(("local", "num_rounds"), [("2,2", 1), ("2", 2)])
async def test_workers_are_stopped_by_hand_one_after_another(
    tmp_path: Path, local: str, num_rounds: int
) -> None:
    """In each round nobody waits for one to be back, so at times there is no worker."""
    with Cluster(tmp_path, local=local, executor="hash", args=SLOW) as cluster:
        async with loaded(cluster) as load:
            for _ in range(num_rounds):
                before = epochs(cluster)
                for worker in psutil.Process(cluster.router.pid).children():
                    worker.send_signal(signal.SIGTERM)
                    await load.until_more(8)
                is_over = partial(lambda old: are_new(old, epochs(cluster)), before)
                await asyncio.to_thread(until, is_over, "all are new", START_S)


async def test_a_drained_worker_stays_away(tmp_path: Path) -> None:
    with Cluster(tmp_path, local="1,2", executor="hash", args=SLOW) as cluster:
        remote = cluster.worker("prefill", 5, "--hash-step-ms", "20")
        async with loaded(cluster):
            done = await baton("drain", "--url", cluster.http, "--wait", "decode-1", "prefill-5")
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[-1] == "all have left"
        assert list(epochs(cluster)) == ["prefill-0", "decode-0"]
        assert remote.wait(START_S) == EX_LEFT
        done = await baton("drain", "--url", cluster.http, "decode-7")
        assert done.returncode == 1
        assert "there is no worker 'decode-7' here; there is decode-0, prefill-0" in done.stderr


async def test_a_worker_that_nobody_starts_again_is_named(tmp_path: Path) -> None:
    with Cluster(tmp_path, local="1,1", executor="hash", args=SLOW) as cluster:
        cluster.worker("decode", 3)
        done = await baton("restart", "--url", cluster.http, "--timeout", "6", "decode-3")
        assert done.returncode == 1
        assert "decode-3 has left and was not started again" in done.stderr


async def test_only_an_operators_key_restarts(tmp_path: Path) -> None:
    files = []
    for name, key in (("clients", CLIENT), ("admins", ADMIN)):
        files.append(tmp_path / name)
        files[-1].write_text(key + "\n")
        files[-1].chmod(0o600)
    clients, admins = files
    args = ("--api-keys", str(clients), "--admin-keys", str(admins), *SLOW)
    with Cluster(tmp_path, executor="hash", args=args, api_key=CLIENT) as cluster:
        before = epochs(cluster)

        async def restart(key_file: Sequence[str]) -> subprocess.CompletedProcess[str]:
            return await baton("restart", "--url", cluster.http, *key_file, "decode-0")

        for key_file, reason in (
            ((), "no API key"),
            (("--api-key-file", str(clients)), "operators"),
        ):
            done = await restart(key_file)
            assert done.returncode == 1 and reason in done.stderr
        assert epochs(cluster) == before
        done = await restart(("--api-key-file", str(admins)))
        assert done.returncode == 0, done.stderr
        assert epochs(cluster)["decode-0"] != before["decode-0"]


def router_pids(cluster: Cluster) -> set[int]:
    """The router processes that serve, without those that finish their clients."""
    started = cluster.events("router process started")
    latest = {event["process"]: event["pid"] for event in started}
    return set(latest.values()) or {cluster.router.pid}


# Successors of one process have a parent, as several processes have from the start.
@pytest.mark.parametrize(
    ("num_processes", "local", "num_times", "num_streams"),
    [
        (1, "2", 2, NUM_STREAMS),
        (2, "2", 1, NUM_STREAMS),
        pytest.param(2, "2,2", 2, 32, marks=pytest.mark.full("more workers and streams")),
    ],
)
async def test_everything_is_restarted_under_load(
    tmp_path: Path, num_processes: int, local: str, num_times: int, num_streams: int
) -> None:
    args = ("--processes", str(num_processes), *SLOW)
    with Cluster(tmp_path, local=local, executor="hash", args=args) as cluster:
        counted = 0.0
        for _ in range(num_times):
            before, pids = epochs(cluster), router_pids(cluster)
            async with loaded(cluster, num_streams) as load:
                done = await baton("restart", "--url", cluster.http)
                assert done.returncode == 0, done.stderr
                assert are_new(before, epochs(cluster))
                assert len(pids) == num_processes and not pids & router_pids(cluster)
                await load.until_more(2 * num_streams)
            assert load.num_connections > 10
            # The counters of processes that have ended are kept.
            counted += len(load.records)
            figures_at(cluster.http, counted)
        assert not [e for e in cluster.events() if e["level"] == "error"]
        router = cluster.router
        children = psutil.Process(router.pid).children(recursive=True)
        router.send_signal(signal.SIGTERM)
        assert router.wait(START_S) == 0
    assert not [child for child in children if child.is_running()]


async def test_a_cluster_with_keys_is_restarted(tmp_path: Path) -> None:
    admins = tmp_path / "admins"
    admins.write_text(ADMIN + "\n")
    admins.chmod(0o600)
    with Locked(tmp_path, "--admin-keys", str(admins), *SLOW) as cluster:
        before = epochs(cluster)
        async with loaded(cluster):
            done = await baton("restart", "--url", cluster.http, "--api-key-file", str(admins))
            assert done.returncode == 0, done.stderr
        assert are_new(before, epochs(cluster))
        assert router_pids(cluster) != {cluster.router.pid}


async def test_a_connection_that_is_kept_leads_to_the_old_process_once_more(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, executor="hash", args=SLOW) as cluster:
        remote = cluster.worker("decode", 3)
        cluster._client.close()  # noqa: SLF001  # the old process would wait for its end, too
        kept = httpx.Limits(keepalive_expiry=None)
        async with httpx.AsyncClient(
            base_url=cluster.http, timeout=60, trust_env=False, limits=kept
        ) as client:
            assert (await client.get("/version")).headers.get("connection") is None
            cluster.router.send_signal(signal.SIGUSR2)
            restarted = partial(cluster.events, "router process restarted")
            await asyncio.to_thread(until, restarted, "the successor serves", START_S)
            answers = [await client.get("/v1/cluster") for _ in range(2)]
        assert [answer.headers.get("connection") for answer in answers] == ["close", None]
        [pid] = router_pids(cluster)
        rows = answers[1].json()["router"]["processes"]
        assert rows[0]["pid"] == pid and cluster.router.pid not in {pid}
        names = {f"{row['role']}-{row['rank']}" for row in answers[1].json()["workers"]}
        assert names == {"prefill-0", "decode-0", "decode-3"}
        assert remote.poll() is None
        left = partial(cluster.events, "the router has left")
        await asyncio.to_thread(until, lambda: len(left()) == 3, "the old one ends")


async def test_the_old_router_goes_on_if_its_successor_fails(tmp_path: Path) -> None:
    """First with wrong settings, and then after it has taken the bus."""
    sampling = tmp_path / "generation_config.json"
    sampling.write_text("{}")
    args = ("--generation-config", str(tmp_path), *SLOW)
    with Cluster(tmp_path, executor="hash", args=args) as cluster:
        async with loaded(cluster):
            sampling.write_text("no JSON")
            done = await baton("restart", "--url", cluster.http)
            assert done.returncode == 1 and "ended with status 78" in done.stderr
            assert "prefill-0: is back" in done.stdout
        sampling.write_text("{}")
        stopped = cluster.local_pids("prefill", 0)[-1]
        os.kill(stopped, signal.SIGSTOP)  # the successor waits for it to join
        cluster.router.send_signal(signal.SIGUSR2)
        left = partial(cluster.events, "the router leaves; meeting its successor")
        await asyncio.to_thread(until, left, "the bus is taken", START_S)
        os.kill(cluster.events("router process started")[-1]["pid"], signal.SIGKILL)
        failed = partial(cluster.events, "the successor failed; the old goes on")
        await asyncio.to_thread(until, lambda: len(failed()) == 2, "it failed")
        os.kill(stopped, signal.SIGCONT)
        cluster.worker("decode", 3).terminate()  # workers join the old one
        async with loaded(cluster):
            done = await baton("restart", "--url", cluster.http)
            assert done.returncode == 0, done.stderr
