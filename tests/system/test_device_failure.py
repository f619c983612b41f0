"""Workers whose GPU fails while they serve: one line each, started again, bounded by failover."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from tests.cluster import START_S, Cluster, hash_oracle, until
from tests.failing_device import SENTENCE
from wire.options import Options
from worker.compute.device_errors import EXIT_DEVICE_FAILED

NUM_TOKENS = 60


def failing(directory: Path, content: str, *args: str) -> Cluster:
    """Return a cluster of two decode workers, of which devices fail; see `failing_device`."""
    trigger = directory / "fails"
    trigger.write_text(content)
    executor = "tests.failing_device:create"
    cluster = Cluster(directory, local="1,2", executor=executor, args=args)
    cluster.environ["TEST_DEVICE_FAILS"] = str(trigger)
    return cluster


def errors(cluster: Cluster) -> list[dict[str, Any]]:
    return [event for event in cluster.events() if event["level"] == "error"]


def request(prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    return body | {"ignore_eos": True, "temperature": 0}


async def test_requests_go_on_elsewhere_and_the_worker_comes_back(tmp_path: Path) -> None:
    with failing(tmp_path, "") as cluster:
        prompts = [[prompt, 7, 9] * 10 for prompt in range(12)]
        async with httpx.AsyncClient(base_url=cluster.http, timeout=60, trust_env=False) as client:
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=request(prompt)) for prompt in prompts)
            )
        options = Options(ignore_eos=True)
        token_ids = [answer.json()["choices"][0]["token_ids"] for answer in answers]
        assert token_ids == [hash_oracle(prompt, NUM_TOKENS, options) for prompt in prompts]
        [line] = errors(cluster)
        assert line["event"] == "the GPU has failed, so this worker ends"
        assert line["reason"] == SENTENCE
        assert line["noticed"].startswith("in forward of a decode step, batch size ")

        def again() -> list[int]:
            return [rank for rank in (0, 1) if len(cluster.local_pids("decode", rank)) == 2]

        [rank] = until(again, "the worker is started again", START_S)
        until(lambda: cluster.find("decode", rank), f"decode-{rank} is back", START_S)
        cluster.until_idle()
    assert f'"status": {EXIT_DEVICE_FAILED}' in cluster.log()


def test_a_request_that_breaks_every_gpu_ends_with_one_error(tmp_path: Path) -> None:
    """It takes no more workers with it than it has attempts."""
    with failing(tmp_path, "every", "--max-attempts", "2") as cluster:
        body = request([1, 7, 9] * 10) | {"stream": True}
        url = cluster.http + "/v1/completions"
        answer = httpx.post(url, json=body, timeout=60, trust_env=False)
        chunks = [
            json.loads(line.removeprefix("data: "))
            for line in answer.text.splitlines()
            if line.startswith("data: {")
        ]
        assert ["error" in chunk for chunk in chunks].count(True) == 1 and "error" in chunks[-1]
        failed = "the GPU has failed, so this worker ends"
        assert [line["event"] for line in errors(cluster)].count(failed) == 2
