"""Many requests at once on the hash executor: every token right, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from tests.cluster import Cluster, hash_oracle
from wire.options import Options

NUM_REQUESTS = 200


def mixed_requests(seed: int, vocab_size: int) -> list[dict[str, Any]]:
    """Short and long prompts, a third behind one of three shared prefixes, some sampled."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    prefixes = [tokens(draw.randrange(100, 600)) for _ in range(3)]
    requests = []
    for _ in range(NUM_REQUESTS):
        prompt = tokens(draw.choice([1, 15, 16, 17, 100, 700, 2000]))
        if draw.random() < 0.33:
            prompt = draw.choice(prefixes) + prompt[:50]
        requests.append(
            {
                "prompt": prompt,
                "max_tokens": draw.choice([1, 2, 16, 64, 100]),
                "temperature": draw.choice([0, 0, 1.0]),
                "seed": draw.randrange(1000),
                "ignore_eos": draw.random() < 0.5,
                "stream": draw.random() < 0.5,
            }
        )
    return requests


def expected_tokens(request: dict[str, Any]) -> list[int]:
    options = Options(
        temperature=float(request["temperature"]),
        seed=request["seed"],
        ignore_eos=request["ignore_eos"],
        max_tokens=request["max_tokens"],
    )
    return hash_oracle(request["prompt"], request["max_tokens"], options)


async def send(client: httpx.AsyncClient, cluster: Cluster, request: dict[str, Any]) -> list[int]:
    body = request | {"model": cluster.model, "return_token_ids": True}
    if not request["stream"]:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return without_eos(response.json()["choices"][0])
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        events = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        chunk = httpx.Response(200, content=event.removeprefix("data: ")).json()
        assert "error" not in chunk, chunk
        tokens += [token for choice in chunk["choices"] for token in without_eos(choice)]
    return tokens


def without_eos(choice: dict[str, Any]) -> list[int]:
    token_ids: list[int] = choice["token_ids"]
    return token_ids[:-1] if choice["finish_reason"] == "stop" else token_ids


async def test_every_request_of_a_mixed_load_ends_with_the_right_tokens(
    hash_cluster: Cluster,
) -> None:
    requests = mixed_requests(seed=5, vocab_size=1000)
    limits = httpx.Limits(max_connections=NUM_REQUESTS)
    async with httpx.AsyncClient(
        base_url=hash_cluster.http, timeout=60, limits=limits, trust_env=False
    ) as client:
        results = await asyncio.gather(*[send(client, hash_cluster, r) for r in requests])
    for request, tokens in zip(requests, results, strict=True):
        assert tokens == expected_tokens(request)
    status = hash_cluster.until_idle()
    assert len(status["workers"]) == 4
