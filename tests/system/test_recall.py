"""The demo model answers questions about its prompt, through the whole system.

A right answer is looked up in the prompt's KV, which one process computed and another one reads:
a cache that was lost, mixed up or misplaced shows here in plain words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx

from scripts.models.stories import recall_cases
from tests.cluster import Cluster

NUM_CASES = 100
LEAST_ACCURACY = 0.9


async def post(client: httpx.AsyncClient, path: str, body: Mapping[str, object]) -> str:
    limits = {"model": "demo", "temperature": 0, "max_tokens": 24}
    response = await client.post(path, json={**body, **limits})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


async def test_recall_of_held_out_stories(cluster: Cluster) -> None:
    cases = list(recall_cases(NUM_CASES, seed=2026))
    async with httpx.AsyncClient(
        base_url=cluster.http,
        timeout=httpx.Timeout(120, pool=None),
        trust_env=False,
        limits=httpx.Limits(max_connections=16),
    ) as client:
        chats = [
            {"messages": [{"role": t.role, "content": t.content} for t in case.messages]}
            for case in cases
        ]
        answers = await asyncio.gather(
            *[post(client, "/v1/chat/completions", chat) for chat in chats],
            *[post(client, "/v1/completions", {"prompt": case.prompt}) for case in cases],
        )
    for form, texts in (("chat", answers[:NUM_CASES]), ("completion", answers[NUM_CASES:])):
        wrong = [
            (case.word, text)
            for case, text in zip(cases, texts, strict=True)
            if not case.is_answered_by(text)
        ]
        assert len(wrong) <= (1 - LEAST_ACCURACY) * NUM_CASES, (form, wrong)
