"""The GET routes."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path

import pytest

from tests.router.site import Answer, Site, write_model
from wire.frames import Role


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(write_model(tmp_path))


async def test_models(site: Site) -> None:
    async with site.client() as client:
        page = (await client.get("/v1/models")).json()
        [card] = page["data"]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (*["letters"] * 2, False)
        assert (card["type"], card["display_name"]) == ("model", "letters")
        assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("letters", "model", 1000)
        assert card["vocab_size"] == 258
        assert (await client.get("/v1/models/letters")).json() == card
        missing = await client.get("/v1/models/org/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_alive_without_any_worker_but_not_ready(tmp_path: Path) -> None:
    site = Site(write_model(tmp_path), join=False)
    async with site.client() as client:
        assert (await client.get("/livez")).status_code == 200
        for path in ("GET /readyz", "GET /health", "GET /ping", "POST /ping"):
            answer = await client.request(*path.split())
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert len(answer.json()["reasons"]) == 2
        site.join(Role.PREFILL)
        site.join(Role.DECODE)
        assert (await client.get("/readyz")).json() == {"status": "ready", "reasons": []}


async def test_the_load_is_what_is_under_way(site: Site) -> None:
    site.answer = lambda prompt: Answer(hangs_after=1)
    async with site.client() as client:
        assert (await client.get("/load")).json() == {"server_load": 0}
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "n": 2}))
        await asyncio.wait_for(site.asked.wait(), 30)
        assert (await client.get("/load")).json() == {"server_load": 2}
        asking.cancel()
        await asyncio.wait_for(site.cancelled.wait(), 30)
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_the_description_is_open_and_says_nothing_of_this_router(site: Site) -> None:
    async with site.client() as client:
        described = await client.get("/openapi.json")
        page = await client.get("/docs")
    assert described.json()["openapi"] == "3.1.0" and "letters" not in described.text
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert page.text.startswith("<!doctype html>")
