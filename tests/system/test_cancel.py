"""A client that goes away takes its request with it, on every worker, wherever the request is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from scripts.tcp_client import connect
from tests.cluster import Cluster, hash_oracle, until
from wire.errors import ErrorCode
from wire.frames import ANY_RANK, Cancel, DecodeRequest, PrefillRequest, Tag
from wire.options import Options
from wire.payloads import encode_prompt

LONG = 20_000  # tokens: minutes at the pace of this cluster
OPTIONS = Options(ignore_eos=True)


@pytest.fixture(scope="module")
def slow_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    args = ("--worker-args", "--hash-step-ms 10 --max-ubatch-tokens 64")
    directory = tmp_path_factory.mktemp("slow")
    with Cluster(directory, local="1,1", executor="hash", args=args) as cluster:
        yield cluster


def completion(prompt: list[int], stream: bool) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": LONG, "ignore_eos": True, "stream": stream}


async def is_still_right(cluster: Cluster) -> None:
    """Nobody else was disturbed."""
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60, trust_env=False) as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        response = await client.post("/v1/completions", json=body | {"return_token_ids": True})
    assert response.json()["choices"][0]["token_ids"] == hash_oracle([5, 6, 7], 8, OPTIONS)


@pytest.mark.parametrize("stream", [True, False])
async def test_http_client_gone_while_tokens_come(slow_cluster: Cluster, stream: bool) -> None:
    async with httpx.AsyncClient(base_url=slow_cluster.http, timeout=60) as client:
        body = completion([1, 2, 3], stream)
        request = asyncio.create_task(client.post("/v1/completions", json=body))

        def is_decoding() -> bool:
            row = slow_cluster.find("decode", 0)
            return row is not None and row["running"] > 0

        await asyncio.to_thread(until, is_decoding, "decoding")
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    await asyncio.to_thread(slow_cluster.until_idle)
    await is_still_right(slow_cluster)


async def test_http_client_gone_while_its_prompt_is_read(slow_cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=slow_cluster.http, timeout=60) as client:
        body = completion([9], stream=True) | {"max_tokens": 1000}
        body["prompt"] = [[number] * LONG for number in range(12)]  # half a minute
        request = asyncio.create_task(client.post("/v1/completions", json=body))

        def is_reading() -> bool:
            row = slow_cluster.find("prefill", 0)
            return row is not None and row["running"] > 0

        await asyncio.to_thread(until, is_reading, "reading")
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    await asyncio.to_thread(slow_cluster.until_idle)
    await is_still_right(slow_cluster)


async def test_tcp_client_cancels_one_request_and_keeps_the_other(slow_cluster: Cluster) -> None:
    client = await connect(*slow_cluster.tcp)
    for request_id, num_tokens in ((1, LONG), (2, 30)):
        client.send(PrefillRequest(request_id, 3, ANY_RANK), encode_prompt([4, 5, 6], OPTIONS))
        client.send(DecodeRequest(request_id, num_tokens))
    client.send(Cancel(1, ErrorCode.CANCELLED))
    tags = []
    async for message in client:
        if message.frame.request_id == 2:  # type: ignore[attr-defined]
            tags.append(message.tag)
            if message.tag is Tag.DECODE_DONE:
                break
    assert tags == [Tag.PREFILL_DONE, *[Tag.DECODE_TOKEN] * 30, Tag.DECODE_DONE]
    await client.close()
    await asyncio.to_thread(slow_cluster.until_idle)


async def test_tcp_client_gone_in_the_middle(slow_cluster: Cluster) -> None:
    client = await connect(*slow_cluster.tcp)
    for request_id in range(1, 6):
        prompt = [request_id] * (LONG if request_id == 1 else 50)
        frame = PrefillRequest(request_id, len(prompt), ANY_RANK)
        client.send(frame, encode_prompt(prompt, OPTIONS))
        client.send(DecodeRequest(request_id, 1000))
    await anext(aiter(client))
    await client.close()
    await asyncio.to_thread(slow_cluster.until_idle)
    await is_still_right(slow_cluster)


def test_nothing_is_left_behind_when_the_cluster_ends(tmp_path: Path) -> None:
    """SIGTERM in the middle of a stream: it is served to its end, then every process ends."""
    args = ("--worker-args", "--hash-step-ms 5")
    with Cluster(tmp_path, local="1,1", executor="hash", args=args) as cluster:
        body = completion([1, 2, 3], stream=True) | {"max_tokens": 100, "return_token_ids": True}
        url = f"{cluster.http}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            cluster.router.terminate()
            events = [line for line in lines if line.startswith("data: ")]
        assert cluster.router.wait(30) == 0
    assert events[-1] == "data: [DONE]"
