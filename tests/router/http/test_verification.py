"""POST /v1/requests/{id}/verify: who may, what is refused, and that no tokens are shown."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from router.core.replay import KeptRequest, Verification
from router.core.state import Limits
from router.processes.channel import Find
from tests.router.http.sibling import sibling
from tests.router.site import Answer, Site, listening, write_model
from wire.frames import PrefillRequest, Role
from wire.process.api_keys import ApiKeys

CLIENT, OTHER, ADMIN = (f"sk-{name}-0123456789" for name in ("client", "other", "admin"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    limits = Limits(max_attempts=1, keep_requests=frozenset(["all"]))
    return Site(write_model(tmp_path), limits=limits)


async def post(site: Site, path: str, body: Any = None, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with site.client() as client:
        return await client.post(path, json=body, headers=headers)


async def complete(site: Site, key: str = "", **fields: Any) -> str:
    """Serve a completion; return the path that verifies it."""
    body = {"prompt": "a secret prompt", "max_tokens": 9} | fields
    answer = await post(site, "/v1/completions", body, key)
    assert answer.status_code == 200, answer.text
    return f"/v1/requests/{answer.json()['id']}/verify"


async def test_every_choice_is_replayed_and_no_text_is_shown(site: Site) -> None:
    path = await complete(site, n=2, temperature=1.0, stop=["ll"])
    site.join(Role.DECODE, 1)
    answer = await post(site, path)
    msgspec.json.decode(answer.content, type=Verification, strict=True)
    found = answer.json()
    assert found["equal"] and found["object"] == "verification"
    assert len(set(site.salts)) == 3 and site.salts[:2] == ["", ""]
    for choice in found["choices"]:
        assert (choice["outcome"], choice["first_difference"]) == ("stop", None)
        assert 2 < choice["tokens"] <= 5, "as many as there were at the stop string"
        [kept], [replayed] = choice["kept"], choice["replayed"]
        assert kept["decode"] == {"worker": "decode-0", "arithmetic": "hash"}
        assert replayed["decode"] == {"worker": "decode-1", "arithmetic": "hash"}
    site.answer = lambda prompt: Answer("help")
    found = (await post(site, path)).json()
    assert not found["equal"]
    for choice in found["choices"]:
        difference = choice["first_difference"]
        assert (difference["position"], choice["tokens"]) == (3, 3)
        assert difference["replayed_by"]["worker"] == "decode-1"
    assert "secret" not in str(found)
    await site.idle()


async def test_without_another_worker_it_is_replayed_only_on_the_same_if_told(site: Site) -> None:
    path = await complete(site)
    refused = await post(site, path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_worker_to_verify")
    assert "no other workers are ready" in refused.json()["error"]["message"]
    found = (await post(site, f"{path}?same_worker=true")).json()
    assert found["equal"] and found["choices"][0]["tokens"] == 5
    site.bus.on_lost(b"decode-0-1")
    site.join(Role.DECODE, 1)
    refused = await post(site, f"{path}?same_worker=true")
    assert "no workers that served it are ready" in refused.json()["error"]["message"]
    assert (await post(site, f"{path}?same_worker=1")).json()["error"]["param"] == "same_worker"


async def test_what_is_not_kept(tmp_path: Path) -> None:
    site = Site(write_model(tmp_path))
    path = await complete(site)
    refused = await post(site, path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_kept")
    assert "--keep-requests" in refused.json()["error"]["message"]


async def test_a_replay_that_fails_is_an_error(site: Site) -> None:
    path = await complete(site)
    site.join(Role.DECODE, 1)
    site.answer = lambda prompt: Answer(fails_after=2)
    refused = await post(site, path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "worker_lost")
    await site.idle()


async def test_only_operators_may(site: Site, tmp_path: Path) -> None:
    for name, keys in (("admin", [ADMIN]), ("clients", [CLIENT, OTHER])):
        (tmp_path / name).write_text("\n".join(keys))
        (tmp_path / name).chmod(0o600)
    admin = ApiKeys(tmp_path / "admin")
    clients = ApiKeys(tmp_path / "clients", beside=admin)
    site.configure(api_keys=clients, administration=site.administration(keys=admin))
    path = await complete(site, CLIENT)
    site.join(Role.DECODE, 1)
    num_asked = len(site.frames(PrefillRequest))
    for key, status in (("", 401), (OTHER, 403), (CLIENT, 403)):
        assert (await post(site, path, key=key)).status_code == status
    assert len(site.frames(PrefillRequest)) == num_asked
    assert (await post(site, path, key=ADMIN)).json()["equal"]


async def test_a_client_that_hangs_up_cancels_the_replay(site: Site) -> None:
    path = await complete(site)
    site.join(Role.DECODE, 1)
    site.asked.clear()
    site.cancelled.clear()
    site.answer = lambda prompt: Answer(hangs_after=2)
    async with listening(site.application) as (host, port):
        _, writer = await asyncio.open_connection(host, port)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{{}}"
        writer.write(head.encode())
        await site.asked.wait()
        writer.close()
        await site.cancelled.wait()
        await site.idle()


async def test_a_request_that_another_process_keeps_is_replayed_here(site: Site) -> None:
    path = await complete(site)
    [kept] = await site.application.verifications.find(path.split("/")[3]) or []
    site.join(Role.DECODE, 1)

    def answer(question: Any) -> object:
        return [kept] if question.name == "there" else None

    async with sibling(site, answer) as channel:
        assert (await post(site, "/v1/requests/there/verify")).json()["equal"]
        assert (await post(site, "/v1/requests/nowhere/verify")).status_code == 404
        kind: Any = list[KeptRequest] | None
        name = path.split("/")[3]
        assert await channel.ask(Find("replay", None, name), kind) == [kept]
        assert await channel.ask(Find("replay", None, "nowhere"), kind) is None
