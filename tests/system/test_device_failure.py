"""A worker whose GPU fails while it serves: one line, started again, and no request fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx

from tests.cluster import START_S, Cluster, hash_oracle, until
from tests.failing_device import SENTENCE
from wire.options import Options
from worker.compute.device_errors import EXIT_DEVICE_FAILED

NUM_TOKENS = 60


async def test_requests_go_on_elsewhere_and_the_worker_comes_back(tmp_path: Path) -> None:
    trigger = tmp_path / "fails"
    trigger.touch()
    executor = "tests.failing_device:create"
    cluster = Cluster(tmp_path, local="1,2", executor=executor)
    cluster.environ["TEST_DEVICE_FAILS"] = str(trigger)
    with cluster:
        prompts = [[prompt, 7, 9] * 10 for prompt in range(12)]

        async def complete(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "return_token_ids": True}
            body |= {"ignore_eos": True, "temperature": 0}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            token_ids: list[int] = response.json()["choices"][0]["token_ids"]
            return token_ids

        async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as client:
            answers = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
        options = Options(ignore_eos=True)
        assert answers == [hash_oracle(prompt, NUM_TOKENS, options) for prompt in prompts]
        assert not trigger.exists()

        lines = [line for line in cluster.log().splitlines(True) if line.endswith("\n")]
        [line] = [line for line in map(json.loads, lines) if line["level"] == "error"]
        assert line["event"] == "the GPU has failed, so this worker ends"
        assert line["reason"] == SENTENCE
        assert str(line["noticed"]).startswith("in forward of a decode step, batch size ")

        def lost() -> list[str]:
            return [rank for rank in "01" if len(cluster.local_pids("decode", int(rank))) == 2]

        [rank] = until(lost, "the worker is started again", START_S)
        until(lambda: cluster.find("decode", int(rank)), f"decode-{rank} is back", START_S)
        cluster.until_idle()
    assert f'"status": {EXIT_DEVICE_FAILED}' in cluster.log()
