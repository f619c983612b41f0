"""`--processes 2`: clients see one router, whichever process they reach, whoever of them dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster import ROOT, START_S, Cluster, until
from tests.faults.checks import problems
from tests.faults.clients import Record, ask_http
from tests.faults.load import draw_requests, send_all
from tests.system.figures import Figures, figures_at
from tests.system.locked import Locked
from wire.options import Options
from wire.process.settings import EX_CONFIG

SLOW = ("--worker-args", "--hash-step-ms 10")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        tmp_path_factory.mktemp("processes"),
        local="2,2",
        executor="hash",
        args=("--processes", "2", "--keep-requests", "all", *SLOW),
    ) as cluster:
        yield cluster


def pids(cluster: Cluster) -> dict[int, int]:
    """The process ids of the router processes, by their number; of each the latest."""
    return {event["process"]: event["pid"] for event in cluster.events("router process started")}


async def pid_of(client: httpx.AsyncClient) -> int:
    """Whom a client's one connection leads to: the first that is named."""
    status = (await client.get("/v1/cluster")).json()
    return int(status["router"]["processes"][0]["pid"])


@asynccontextmanager
async def one_each(cluster: Cluster) -> AsyncIterator[list[httpx.AsyncClient]]:
    """A client with one connection to each process, in the order of their numbers."""
    found: dict[int, httpx.AsyncClient] = {}
    async with AsyncExitStack() as stack:
        while len(found) < 2:
            client = httpx.AsyncClient(
                base_url=cluster.http,
                timeout=60,
                trust_env=False,
                limits=httpx.Limits(max_connections=1, keepalive_expiry=None),
            )
            await stack.enter_async_context(client)
            found.setdefault(await pid_of(client), client)
        yield [found[pid] for pid in pids(cluster).values()]


async def patient(
    ask: Callable[..., Awaitable[httpx.Response]], path: str, **body: Any
) -> httpx.Response:
    """The answer; a 503 says that another process could not be asked in time, so ask again."""
    while True:
        answer = await ask(path, **body)
        if answer.status_code != 503:
            return answer
        await asyncio.sleep(0.1)


def streams(count: int, num_tokens: int = 60, face: str = "http") -> list[Record]:
    options = Options(ignore_eos=True)
    return [Record([len(face), 2, index], options, num_tokens, face) for index in range(count)]


async def test_both_serve_and_every_stream_is_exact(cluster: Cluster) -> None:
    before = Figures(cluster.http)
    records = draw_requests(3, 32, prompt=(3, 300), answer=(2, 40))
    await send_all(cluster, records, clients=16)
    assert problems(records) == []
    both = set(pids(cluster).values())
    await asyncio.to_thread(until, lambda: shares(cluster) == both, "both serve")
    await asyncio.to_thread(cluster.until_idle)
    ended = before.ended + len(records)
    after = figures_at(cluster.http, ended)
    names = Counter((each.name, *sorted(each.labels.items())) for each in after.samples)
    assert [name for name, count in names.items() if count > 1] == []
    generated = after.one("baton_generated_tokens_total") - before.one(
        "baton_generated_tokens_total"
    )
    assert generated == sum(len(record.tokens) for record in records)
    steps = after.by("rank", "baton_worker_steps_total", role="decode")
    assert steps == {str(row["rank"]): row["step"] for row in decoders(cluster)}
    assert after.one("baton_request_seconds_count") == ended


async def test_the_page_of_one_process_shows_the_requests_of_both(cluster: Cluster) -> None:
    async with (
        asyncio.timeout(60),
        one_each(cluster) as viewers,
        one_each(cluster) as askers,
        viewers[0].stream("GET", "/v1/cluster/events") as shown,
    ):
        lines = shown.aiter_lines()
        assert await anext(lines) == "event: snapshot"
        names = [f"page-{number}" for number in range(2)]
        for name, client in zip(names, askers, strict=True):
            body = {"prompt": [1, 2, 3], "max_tokens": 4}
            headers = {"x-request-id": name}
            (await client.post("/v1/completions", json=body, headers=headers)).raise_for_status()
        ended: dict[str, set[str]] = {name: set() for name in names}
        async for line in lines:
            if not line.startswith("data: "):
                continue
            for row in json.loads(line.removeprefix("data: "))["requests"]:
                if row.get("id") in ended and row.get("total_s") is not None:
                    ended[row["id"]].add(row["key"].partition("-")[0])
            if all(ended.values()):
                break
        assert [ended[name] for name in names] == [{str(pid)} for pid in pids(cluster).values()]


def shares(cluster: Cluster) -> set[int]:
    """The processes that have taken some of many connections; one that has to wait takes none."""
    found = set()
    connect = partial(httpx.Client, base_url=cluster.http, trust_env=False, timeout=60)
    clients = [connect() for _ in range(40)]
    for client in clients:
        found.add(client.get("/v1/cluster").json()["router"]["processes"][0]["pid"])
    for client in clients:
        client.close()
    return found


def decoders(cluster: Cluster) -> list[dict[str, Any]]:
    return [row for row in cluster.status()["workers"] if row["role"] == "decode"]


async def test_one_is_killed_while_streams_run_on_the_other(cluster: Cluster) -> None:
    """Those of the other go on, those of the killed see an error; a new one takes its place."""
    counted = Figures(cluster.http).one("baton_generated_tokens_total")
    killed = pids(cluster)[1]
    staying, going = streams(6, 100), streams(1, 10_000)
    async with one_each(cluster) as (other, victim):
        asked = [asyncio.create_task(ask_http(other, staying[0]))]
        asked.append(asyncio.create_task(ask_http(victim, going[0])))
        await asyncio.gather(staying[0].until_tokens(5), going[0].until_tokens(5))
        os.kill(killed, signal.SIGKILL)
        await asyncio.gather(*asked)
        status = (await other.get("/v1/cluster")).json()
        assert status["router"]["processes"][0]["pid"] == pids(cluster)[0]
        assert problems(staying[:1]) == [] and going[0].error
        # New connections reach the other one.
        await send_all(cluster, staying[1:], clients=5)
        assert problems(staying[1:]) == []
    await asyncio.to_thread(until, lambda: pids(cluster)[1] != killed, "another", START_S)
    await asyncio.to_thread(until, lambda: len(shares(cluster)) == 2, "both serve", START_S)
    records = streams(8)
    await send_all(cluster, records, clients=8)
    assert problems(records) == []
    await asyncio.to_thread(cluster.until_idle)
    assert Figures(cluster.http).one("baton_generated_tokens_total") > counted


async def test_a_response_is_found_from_the_other_process(cluster: Cluster) -> None:
    async with one_each(cluster) as (one, other):
        body = {"input": "hi", "max_output_tokens": 4}
        made = (await patient(one.post, "/v1/responses", json=body)).json()
        path = f"/v1/responses/{made['id']}"
        assert (await patient(other.get, path)).json() == made
        items = (await patient(other.get, f"{path}/input_items")).json()["data"]
        assert [item["role"] for item in items] == ["user"]
        body = {"input": "more", "previous_response_id": made["id"], "max_output_tokens": 4}
        more = await patient(other.post, "/v1/responses", json=body)
        assert more.status_code == 200, more.text
        items = await patient(one.get, f"/v1/responses/{more.json()['id']}/input_items")
        said = items.json()["data"]
        assert len(said) == 2 + len(made["output"])
        assert (await patient(other.delete, path)).json()["deleted"]
        for client in (one, other):
            assert (await patient(client.get, path)).status_code == 404
            assert (await patient(client.delete, path)).status_code == 404
        gone = await patient(one.post, "/v1/responses", json=body)
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "previous_response_id")


async def test_a_request_is_explained_by_the_other_process(cluster: Cluster) -> None:
    async with one_each(cluster) as (one, other):
        body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
        made = (await patient(one.post, "/v1/completions", json=body)).json()
        path = f"/v1/requests/{made['id']}"
        here, there = [(await patient(each.get, path)).json() for each in (one, other)]
        assert here["choices"][0]["cache"]["reason"] == "shorter_than_a_block"
        # Processes measure time from different starts; so only the times may differ a little.
        for report in (here, there):
            for attempt in report["choices"][0]["attempts"]:
                assert abs(attempt.pop("placed_at") - report["choices"][0]["submitted_at"]) < 30
            del report["choices"][0]["submitted_at"]
        assert here == there
        for client in (one, other):
            assert (await patient(client.get, f"{path}0")).status_code == 404
            found = (await patient(client.post, f"{path}/verify")).json()
            assert found["equal"] and found["choices"][0]["tokens"] == 2


async def test_a_process_that_is_stuck_holds_up_nobody_who_asks_the_other(
    cluster: Cluster,
) -> None:
    async with one_each(cluster) as (one, other):
        counted = (await patient(one.get, "/metrics")).text
        stuck = await pid_of(other)
        os.kill(stuck, signal.SIGSTOP)
        try:
            for path in ("/metrics", "/v1/cluster", "/load", "/readyz"):
                assert (await patient(one.get, path)).status_code == 200
            again = (await patient(one.get, "/metrics")).text
            assert (await one.get("/v1/responses/resp_it_may_have")).status_code == 503
        finally:
            os.kill(stuck, signal.SIGCONT)
        requests = "baton_requests_total"
        assert lines(again, requests) == lines(counted, requests)


def lines(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(name)]


async def test_a_stop_lets_all_streams_end(tmp_path: Path) -> None:
    # No worker is to be lost because the machine has no time for it.
    args = ("--processes", "2", "--heartbeat-ms", "10000", *SLOW)
    with Cluster(tmp_path, local="1,1", executor="hash", args=args) as cluster:
        children = psutil.Process(cluster.router.pid).children(recursive=True)
        assert len(children) == 4
        records = [*streams(6, 100, "http"), *streams(6, 100, "tcp")]
        sending = asyncio.create_task(send_all(cluster, records, clients=12))
        await asyncio.gather(*[record.until_tokens(3) for record in records])
        cluster.router.send_signal(signal.SIGTERM)
        await sending
        assert problems(records) == []
        assert await asyncio.to_thread(cluster.router.wait, START_S) == 0
        assert [child for child in children if child.is_running()] == []
        # The workers left while there were buses to leave over.
        events = [event["event"] for event in cluster.events()]
        assert not {"router lost", "worker lost", "local workers killed"} & set(events)
        assert events.count("worker left") == 4


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    ports = ("--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--bus", "tcp://127.0.0.1:0")
    command = [sys.executable, "-m", "router", "--processes", "2", *ports, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S)


def test_a_bad_setting_is_reported_once(tmp_path: Path) -> None:
    ended = run("--api-keys", str(tmp_path / "nowhere"), "--log-level", "error")
    assert ended.returncode == EX_CONFIG
    assert ended.stderr.count("nowhere") == 1, ended.stderr


def test_a_second_router_does_not_mix_with_the_first(cluster: Cluster) -> None:
    address = cluster.http.removeprefix("http://")
    ended = run("--http", address, "--log-level", "error")
    assert ended.returncode == 1
    assert ended.stderr.count(address) == 1, ended.stderr


def test_both_ask_for_keys_and_nothing_new_listens(tmp_path: Path) -> None:
    with Locked(tmp_path, "--processes", "2") as cluster:
        for key, status in ((cluster.key, 200), ("sk-wrong", 401), ("", 401)):
            assert {cluster.complete(key).status_code for _ in range(12)} == {status}
        parent = psutil.Process(cluster.router.pid)
        routers = [parent, *(psutil.Process(pid) for pid in pids(cluster).values())]
        argv = " ".join(word for each in routers for word in each.cmdline())
        assert not [secret for secret in cluster.secrets if secret in argv]
        of_parent, *others = [
            Counter(
                f"{each.laddr.ip}:{each.laddr.port}"
                for each in process.net_connections("inet")
                if each.status == psutil.CONN_LISTEN
            )
            for process in routers
        ]
        listening = others[0] + others[1]
        faces = [cluster.http.removeprefix("http://"), cluster.endpoints["tcp"][len("tcp://") :]]
        buses = [bus.removeprefix("tcp://") for bus in cluster.bus.split(",")]
        assert listening == Counter([*faces, *faces, *buses])
        assert of_parent == listening, "the parent keeps them for successors"
        assert not [each for process in routers for each in listens_locally(process)]


def listens_locally(process: psutil.Process) -> list[str]:
    """The Unix sockets that a process listens on."""
    inodes = {
        os.readlink(link)[len("socket:[") : -1]
        for link in Path(f"/proc/{process.pid}/fd").iterdir()
        if os.readlink(link).startswith("socket:[")
    }
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[6] for row in rows if row[6] in inodes and int(row[3], 16) & 1 << 16]


def test_a_killed_parent_leaves_no_process(cluster: Cluster) -> None:
    """The last test of the shared cluster."""
    children = psutil.Process(cluster.router.pid).children(recursive=True)
    cluster.router.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
