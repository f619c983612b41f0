"""The GET routes."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.router.site import Site, write_model
from wire.frames import Role


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(write_model(tmp_path))


async def test_models(site: Site) -> None:
    async with site.client() as client:
        [card] = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("letters", "model", 1000)
        assert (await client.get("/v1/models/letters")).json() == card
        missing = await client.get("/v1/models/org/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_alive_without_any_worker_but_not_ready(tmp_path: Path) -> None:
    site = Site(write_model(tmp_path), join=False)
    async with site.client() as client:
        assert (await client.get("/livez")).status_code == 200
        for path in ("/readyz", "/health"):
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert len(answer.json()["reasons"]) == 2
        site.join(Role.PREFILL)
        site.join(Role.DECODE)
        assert (await client.get("/readyz")).json() == {"status": "ready", "reasons": []}


async def test_draining_is_not_ready(site: Site) -> None:
    site.application.draining = True
    async with site.client() as client:
        answer = await client.get("/readyz")
        assert answer.json()["reasons"] == ["the router is draining"]
        assert (await client.get("/livez")).status_code == 200


async def test_cluster_metrics_and_version(site: Site) -> None:
    async with site.client() as client:
        assert (await client.get("/v1/cluster")).json()["router"] == {"running": 0, "waiting": 0}
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert "baton_requests_running 0.0" in answer.text
        assert isinstance((await client.get("/version")).json()["version"], str)


async def test_polls_are_debug_lines_whatever_they_are_told(tmp_path: Path) -> None:
    site = Site(write_model(tmp_path), join=False)
    async with site.client() as client:
        with capture_logs() as lines:
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/v1/models/other")).status_code == 404
    assert [line["log_level"] for line in lines] == ["debug", "debug", "info"]
