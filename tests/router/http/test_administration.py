"""Routes for operators: who may use them, and what they ask of workers."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.router.site import Site, write_model
from wire.frames import Drain, DrainAsk, Tag
from wire.process.api_keys import ApiKeys

CLIENT, ADMIN = "sk-client-0123456789", "sk-admin-0123456789"
PATHS = (
    "/v1/workers/decode-0/drain",
    "/v1/workers/decode-0/restart",
    "/v1/router/restart",
)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(write_model(tmp_path))


def keys(path: Path, key: str, beside: ApiKeys | None = None) -> ApiKeys:
    path.write_text(key)
    path.chmod(0o600)
    return ApiKeys(path, beside=beside)


def drains(site: Site) -> list[tuple[bytes, Drain]]:
    return [(peer, m.frame) for peer, m in site.seen if isinstance(m.frame, Drain)]


async def post(site: Site, path: str, key: str = "", **headers: str) -> httpx.Response:
    sent = {"authorization": f"Bearer {key}"} if key else {}
    async with site.client() as client:
        return await client.post(path, headers=sent | headers)


async def test_a_worker_is_asked_once_to_drain(site: Site) -> None:
    for path, ask in zip(PATHS, (DrainAsk.LEAVE, DrainAsk.RESTART), strict=False):
        answer = await post(site, path)
        assert answer.json() == {"worker": "decode-0", "epoch": 1, "placed": 0}
        assert drains(site)[-1] == (b"decode-0-1", Drain(1, 0, ask))
    site.bus.on_message(b"decode-0-1", [Tag.DRAIN.to_bytes(4, "little"), Drain(1, 5000).header()])
    num_asked = len(drains(site))
    assert (await post(site, PATHS[0])).status_code == 200
    assert len(drains(site)) == num_asked


async def test_a_worker_that_is_not_there_is_named_with_those_that_are(site: Site) -> None:
    answer = await post(site, "/v1/workers/decode-7/drain")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "there is no worker 'decode-7' here; there is decode-0, prefill-0"
    )


async def test_why_the_router_could_not_be_restarted(site: Site) -> None:
    assert (await post(site, PATHS[2])).json() == {"status": "restarted"}
    site.restart_problem = "the successor ended with status 78"
    answer = await post(site, PATHS[2])
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "restart_failed")
    assert answer.json()["error"]["message"] == site.restart_problem


@pytest.mark.parametrize("path", PATHS)
async def test_only_operators_may(site: Site, tmp_path: Path, path: str) -> None:
    admin = keys(tmp_path / "admin", ADMIN)
    clients = keys(tmp_path / "clients", CLIENT, beside=admin)
    site.configure(api_keys=clients, administration=site.administration(keys=admin))
    for key, status in (("", 401), ("sk-nobody-0123456789", 401), (CLIENT, 403), (ADMIN, 200)):
        answer = await post(site, path, key)
        assert answer.status_code == status, answer.text
    # An operator's key is good for all that a client's is.
    async with site.client() as client:
        headers = {"authorization": f"Bearer {ADMIN}"}
        assert (await client.get("/v1/cluster", headers=headers)).status_code == 200
    # Without keys for operators, nobody may.
    site.configure(administration=site.administration())
    refused = await post(site, path, CLIENT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
    assert "--admin-keys" in refused.json()["error"]["message"]
    assert len(drains(site)) == ("workers" in path)


@pytest.mark.parametrize("path", PATHS)
async def test_no_web_page_may(site: Site, path: str) -> None:
    answer = await post(site, path, origin="https://elsewhere.example")
    assert answer.json()["error"]["code"] == "origin_not_allowed"
    assert drains(site) == []
