"""/metrics of a real cluster: exactly as many as there were of each outcome, gauges back at 0."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, until
from tests.faults.clients import Record, TcpClient
from tests.oracle import hash_oracle
from tests.system.figures import Figures
from wire.options import Options

N = 3
PROMPT = [5, 6, 7]
LONG = 20_000  # tokens: minutes at the pace of this cluster
TOKEN_BYTES, MAX_PROMPT = 64, 100  # of the hash executor; what may be handed over


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    limit = ("--max-kv-transfer-bytes", str(MAX_PROMPT * TOKEN_BYTES))
    args = ("--max-attempts", "1", *limit, "--worker-args", "--hash-step-ms 10")
    with Cluster(tmp_path, local="1,1", executor="hash", args=args) as cluster:
        yield cluster


def completion(**changes: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return body | changes


async def ask(client: httpx.AsyncClient, status: int, **changes: Any) -> str:
    """Ask and return the text of the answer; the status must be this one."""
    response = await client.post("/v1/completions", json=completion(**changes))
    assert response.status_code == status, response.text
    return str(response.json()["choices"][0]["text"]) if status == 200 else ""


async def start_endless(cluster: Cluster, client: httpx.AsyncClient) -> list[asyncio.Task[Any]]:
    """Start N requests that do not end by themselves, and wait until all are decoded."""
    body = completion(max_tokens=LONG)
    tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(N)]

    def are_decoding() -> bool:
        row = cluster.find("decode", 0)
        return row is not None and row["running"] == N

    await asyncio.to_thread(until, are_decoding, "decoding")
    return tasks


async def overrun(cluster: Cluster) -> None:
    """A raw TCP request that its deadline ends."""
    client = await TcpClient.connect(*cluster.tcp)
    record = Record(PROMPT, Options(ignore_eos=True, deadline_ms=300), LONG, "tcp")
    await client.ask(record)
    await client.close()
    assert record.error


async def test_each_outcome_is_counted_exactly(cluster: Cluster) -> None:
    third = hash_oracle(PROMPT, 8, Options(ignore_eos=True))[2]
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60, trust_env=False) as client:
        text = await ask(client, 200, max_tokens=64)
        middle = text[len(text) // 4 :][:4]
        for _ in range(N):
            await ask(client, 200)
            await ask(client, 200, stop_token_ids=[third])
            await ask(client, 200, max_tokens=64, stop=middle)
            await ask(client, 400, temperature=-1)
            await ask(client, 400, max_tokens=10**9)
            await ask(client, 400, prompt=[1] * (MAX_PROMPT + 1))
            await overrun(cluster)
        for task in await start_endless(cluster, client):
            task.cancel()
        await asyncio.to_thread(cluster.until_idle)
        tasks = await start_endless(cluster, client)
        cluster.kill_local("decode", 0)
        answers = await asyncio.gather(*tasks)
    assert {answer.status_code for answer in answers} == {503}
    await asyncio.to_thread(until, lambda: cluster.find("decode", 0), "decode-0 is back")
    await asyncio.to_thread(cluster.until_idle)
    figures = Figures(cluster.http)
    assert figures.by("outcome", "baton_requests_total") == {
        "length": N + 1,
        "stop": 2 * N,
        "deadline_exceeded": N,
        "cancelled": N,
        "worker_lost": N,
    }
    assert figures.by("outcome", "baton_http_requests_total", endpoint="completions") == {
        "length": N + 1,
        "stop": 2 * N,
        "cancelled": N,
        "worker_lost": N,
        "context_length_exceeded": N,
        "kv_transfer_too_large": N,
        "invalid_value": N,
    }
    assert figures.by("code", "baton_requests_rejected_total") == {
        "context_length_exceeded": N,
        "kv_transfer_too_large": N,
    }
    assert figures.busy == []


async def test_a_workers_own_port_says_what_it_did_and_is_at_rest_after_aborts(
    tmp_path: Path,
) -> None:
    worker_args = ("--worker-args", "--hash-step-ms 5 --metrics 127.0.0.1:0")
    with Cluster(tmp_path, local="1,1", executor="hash", args=worker_args) as cluster:
        async with httpx.AsyncClient(base_url=cluster.http, timeout=60, trust_env=False) as client:
            for number in range(N):
                await ask(client, 200, prompt=[number + 1] * 20)
            for task in await start_endless(cluster, client):
                task.cancel()
            await asyncio.to_thread(cluster.until_idle)
        urls = [event["url"].removesuffix("/metrics") for event in cluster.events("metrics")]
        assert len(urls) == 2
        each = [Figures(url) for url in urls]
        router = Figures(cluster.http)
    assert [figures.busy for figures in each] == [[], []]
    by_role = {figures.one("baton_peers_up", kind="decode"): figures for figures in each}
    decode, prefill = by_role[0], by_role[1]
    assert [figures.one("baton_peers_up", kind="router") for figures in each] == [1, 1]
    for figures in each:
        assert figures.one("baton_kv_transfers_total", outcome="done") == 2 * N
        assert figures.one("baton_step_seconds_count") == figures.one("baton_worker_steps_total")
        assert figures.one("baton_kv_inflight_limit_bytes") > 0
    sent = prefill.one("baton_kv_transfer_bytes_total")
    assert sent == decode.one("baton_kv_transfer_bytes_total") > 0
    offers = prefill.one("baton_frames_total", plane="kv", tag="kv_cache", direction="sent")
    assert offers >= 4 * N  # at least an offer and a segment each
    came = decode.one("baton_frames_total", plane="kv", tag="kv_cache", direction="received")
    assert came == offers
    asked = {"plane": "bus", "tag": "prefill_request"}
    assert router.one("baton_frames_total", direction="sent", **asked) == 2 * N
    assert prefill.one("baton_frames_total", direction="received", **asked) == 2 * N
    tokens = {"plane": "bus", "tag": "decode_token"}
    got = router.one("baton_frames_total", direction="received", **tokens)
    assert got == decode.one("baton_frames_total", direction="sent", **tokens)
