"""Workers killed with SIGKILL while they serve: no request fails, no token is lost or doubled."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.cluster import START_S, Cluster, hash_oracle, until
from wire.options import Options

NUM_TOKENS = 100
SAMPLED = {"temperature": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.3, "min_tokens": 90}


async def complete(
    client: httpx.AsyncClient, prompt: list[int], **options: object
) -> dict[str, object]:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "return_token_ids": True} | options
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, object] = response.json()["choices"][0]
    return choice


def busy(cluster: Cluster, role: str, rank: int, steps: int = 0) -> Callable[[], bool]:
    """What says whether a worker has work, and has made so many steps."""

    def is_busy() -> bool:
        row = cluster.find(role, rank)
        return row is not None and row["placed"] > 0 and row["step"] >= steps

    return is_busy


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_worker_costs_no_request(tmp_path: Path, role: str) -> None:
    # Prompts of 600 tokens in steps of 128 keep the prefill workers busy too.
    args = ("--worker-args", "--hash-step-ms 20 --max-ubatch-tokens 128 --segment-bytes 1048576")
    with Cluster(tmp_path, local="1,1", executor="hash", args=args) as cluster:
        # A slow worker has work until it is killed, whenever that is.
        slow = ("--hash-step-ms", "500", "--max-ubatch-tokens", "128")
        victim = cluster.worker(role, 1, *slow)
        prompts = [[prompt, 7, 9] * 200 for prompt in range(24)]
        async with httpx.AsyncClient(
            base_url=cluster.http, timeout=60, limits=httpx.Limits(max_connections=40)
        ) as client:
            streams = [
                asyncio.create_task(complete(client, prompt, ignore_eos=True, temperature=0))
                for prompt in prompts
            ]
            await asyncio.to_thread(until, busy(cluster, role, 1, 1), f"{role}-1 has work")
            victim.send_signal(signal.SIGKILL)
            results = await asyncio.gather(*streams)
            metrics = (await client.get("/metrics")).text
        options = Options(ignore_eos=True)
        expected = [hash_oracle(prompt, NUM_TOKENS, options) for prompt in prompts]
        assert [result["token_ids"] for result in results] == expected
        assert 'baton_failovers_total{code="worker_lost"}' in metrics
        cluster.until_idle()


@pytest.mark.parametrize("worker_args", ["", "--weights int8 --dtype bfloat16"])
async def test_what_is_sampled_goes_on_at_the_same_position(
    tmp_path: Path, worker_args: str
) -> None:
    """A real model with a seed, penalties and min_tokens: the same text with and without a kill."""
    with Cluster(tmp_path, local="1,1", args=(f"--worker-args={worker_args}",)) as cluster:
        async with httpx.AsyncClient(base_url=cluster.http, timeout=120) as client:
            prompts = [[5 + n, 17, 40, 33, 9, 21] for n in range(8)]

            async def all_of_them() -> list[object]:
                return [
                    choice["token_ids"]
                    for choice in await asyncio.gather(
                        *(complete(client, each, seed=each[0], **SAMPLED) for each in prompts)
                    )
                ]

            undisturbed = await all_of_them()
            is_busy = busy(cluster, "decode", 0)

            async def disturbed(life: int) -> list[object]:
                """The same, with decode-0 killed when it has work, if it still has."""

                def is_there() -> object:
                    lives = len(cluster.local_pids("decode", 0))
                    return lives == life and cluster.find("decode", 0)

                await asyncio.to_thread(until, is_there, "decode-0 is there", START_S)
                texts = asyncio.create_task(all_of_them())
                await asyncio.to_thread(until, lambda: texts.done() or is_busy(), "it has work")
                cluster.kill_local("decode", 0)
                return await texts

            for life in range(1, 9):
                assert await disturbed(life) == undisturbed
                if "baton_failovers_total{" in (await client.get("/metrics")).text:
                    break
            else:
                pytest.fail("every kill came when the texts were over")
        cluster.until_idle()
