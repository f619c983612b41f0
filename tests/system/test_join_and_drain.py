"""A decode worker joins a running cluster by one command, gets work, and leaves without a loss."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from tests.cluster import Cluster, hash_oracle, until
from wire.options import Options

NUM_TOKENS = 150  # three seconds at 20 ms a step: long enough to be stopped in the middle


async def complete(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body | {"return_token_ids": True})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]  # type: ignore[no-any-return]


async def test_a_worker_joins_gets_work_and_drains_on_sigterm(tmp_path: Path) -> None:
    args = ("--worker-args", "--hash-step-ms 20")
    with Cluster(tmp_path, local="1,1", executor="hash", args=args) as cluster:
        joined = cluster.worker("decode", 3, "--hash-step-ms", "20")
        prompts = [[prompt, 7, 9] * 20 for prompt in range(40)]
        async with httpx.AsyncClient(
            base_url=cluster.http, timeout=60, limits=httpx.Limits(max_connections=40)
        ) as client:
            streams = [asyncio.create_task(complete(client, prompt)) for prompt in prompts]

            def has_work() -> bool:
                row = cluster.find("decode", 3)
                return row is not None and row["running"] > 0

            await asyncio.to_thread(until, has_work, "decode-3 has work")
            joined.send_signal(signal.SIGTERM)
            results = await asyncio.gather(*streams)
        expected = [hash_oracle(prompt, NUM_TOKENS, Options(ignore_eos=True)) for prompt in prompts]
        assert results == expected
        assert await asyncio.to_thread(joined.wait, 30) == 0
        until(lambda: cluster.find("decode", 3) is None, "decode-3 gone")
        cluster.until_idle()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_second_signal_ends_streams_with_an_error_and_at_once(
    num_processes: int, tmp_path: Path
) -> None:
    args = ("--worker-args", "--hash-step-ms 20", "--processes", str(num_processes))
    with Cluster(tmp_path, executor="hash", args=args) as cluster:
        body = {"model": "demo", "prompt": [1, 2], "max_tokens": 2000, "stream": True}
        url = f"{cluster.http}/v1/completions"
        with httpx.stream("POST", url, json=body | {"ignore_eos": True}, timeout=60) as response:
            events = response.iter_lines()
            assert next(events).startswith("data: {")
            cluster.router.send_signal(signal.SIGTERM)  # the same twice might come as one
            cluster.router.send_signal(signal.SIGINT)
            *_, error, done = [line for line in events if line]
        assert '"code":"draining"' in error and done == "data: [DONE]"
        assert cluster.router.wait(20) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    assert "Traceback" not in cluster.log_path.read_text()
