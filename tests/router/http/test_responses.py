"""Stored responses over HTTP, and threads for small bodies that continue large ones."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.model import ServedModel
from router.api.responses.store import KeptResponse
from router.http.limits import INLINE_BYTES
from tests.router.http.sibling import sibling
from tests.router.site import Site, write_model
from wire.process.api_keys import ApiKeys


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(write_model(tmp_path))


async def respond(site: Site, **fields: Any) -> dict[str, Any]:
    async with site.client() as client:
        answer = await client.post("/v1/responses", json={"input": "hi"} | fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def ask(site: Site, method: str, path: str, **headers: str) -> httpx.Response:
    async with site.client() as client:
        return await client.request(method, f"/v1/responses/{path}", headers=headers)


async def test_its_input(site: Site) -> None:
    first = await respond(site)
    second = await respond(site, input="more", previous_response_id=first["id"])
    page = (await ask(site, "GET", f"{second['id']}/input_items?order=asc&limit=2")).json()
    assert [item["role"] for item in page["data"]] == ["user", "assistant"]
    assert page["has_more"]
    assert page["data"][1]["id"] == first["output"][0]["id"]
    rest = await ask(site, "GET", f"{second['id']}/input_items?order=asc&after={page['last_id']}")
    assert [item["content"][0]["text"] for item in rest.json()["data"]] == ["more"]


async def test_it_can_be_deleted(site: Site) -> None:
    body = await respond(site)
    gone = await ask(site, "DELETE", body["id"])
    assert gone.json() == {"id": body["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        missing = await ask(site, method, body["id"])
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "response_not_found"


async def test_a_key_cannot_read_responses_of_another(site: Site, tmp_path: Path) -> None:
    keys = tmp_path / "api_keys"
    keys.write_text("sk-anna-0123456789\nsk-ben-0123456789\n")
    keys.chmod(0o600)
    site.configure(api_keys=ApiKeys(keys))
    anna, ben = ({"authorization": f"Bearer {key}"} for key in keys.read_text().split())
    async with site.client() as client:
        answer = await client.post("/v1/responses", json={"input": "hi"}, headers=anna)
    name = answer.json()["id"]
    for headers, status in ((anna, 200), (ben, 404)):
        assert (await ask(site, "GET", name, **headers)).status_code == status
    assert (await ask(site, "DELETE", name, **ben)).status_code == 404
    assert (await ask(site, "DELETE", name)).status_code == 401


async def test_a_response_of_another_process_is_found_and_deleted_there(site: Site) -> None:
    asked = list[Any]()
    there = {"resp_there": KeptResponse("", b'{"id": "resp_there"}', b"[]")}

    def answer(question: Any) -> object:
        asked.append(question)
        if question.what == "response":
            return there.get(question.name)
        assert question.what == "delete"
        return there.pop(question.name, None) is not None

    async with sibling(site, answer):
        here = (await respond(site))["id"]
        assert (await ask(site, "GET", here)).json()["id"] == here
        assert (await ask(site, "DELETE", here)).status_code == 200
        assert asked == [], "what is kept here is asked of nobody"
        again = await ask(site, "GET", "resp_there")
        assert (again.status_code, again.json()) == (200, {"id": "resp_there"})
        for status in (200, 404):
            assert (await ask(site, "DELETE", "resp_there")).status_code == status
        assert (await ask(site, "GET", "resp_there")).status_code == 404


async def test_a_small_body_that_goes_on_from_much_is_read_in_a_thread(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []
    check = ServedModel.check_name

    def note(model: ServedModel, name: str | None) -> None:
        readers.append(threading.current_thread().name)
        check(model, name)

    monkeypatch.setattr(ServedModel, "check_name", note)
    # No model has to read who the user is.
    first = await respond(site, user="u" * INLINE_BYTES, max_output_tokens=1)
    await respond(site, max_output_tokens=1)
    await respond(site, previous_response_id=first["id"], max_output_tokens=1)
    assert [name.startswith("ordinary-body") for name in readers] == [True, False, True]
