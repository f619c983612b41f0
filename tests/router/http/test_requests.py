"""GET /v1/requests/{id} over HTTP: who sees what, under which ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from router.core.history.report import RequestReport
from router.processes.channel import Find
from tests.router.http.sibling import sibling
from tests.router.site import Site, events, write_model
from wire.process.api_keys import ApiKeys, digest, name_of

SYSTEM = {"role": "system", "content": "Answer in one word, and never in two."}
KEYS = ("sk-anna-0123456789", "sk-ben-0123456789")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(write_model(tmp_path))


@pytest.fixture
def locked(site: Site, tmp_path: Path) -> Site:
    keys = tmp_path / "api_keys"
    keys.write_text("\n".join(KEYS))
    keys.chmod(0o600)
    site.configure(api_keys=ApiKeys(keys))
    return site


async def call(
    site: Site, method: str, path: str, body: Any = None, *, key: str = "", host: str = "127.0.0.1"
) -> httpx.Response:
    transport = httpx.ASGITransport(site.application, client=(host, 5))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", trust_env=False, verify=False
    ) as client:
        return await client.request(method, path, json=body, headers=headers)


async def chat(site: Site, *contents: str, key: str = "", **fields: Any) -> dict[str, Any]:
    messages = [SYSTEM, *({"role": "user", "content": content} for content in contents)]
    body = {"messages": messages, "max_tokens": 5} | fields
    answer = await call(site, "POST", "/v1/chat/completions", body, key=key)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


async def show(site: Site, name: str, **how: str) -> dict[str, Any]:
    answer = await call(site, "GET", f"/v1/requests/{name}", **how)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


async def test_a_chat_tells_in_which_message_it_differs(site: Site) -> None:
    first = await chat(site, "What is red?", "And green?")
    second = await chat(site, "What is red?", "And blue?", baton_usage=True)
    cache = second["usage"]["baton"]["cache"]
    assert (cache["prefill_worker_tokens"], cache["reason"]) == (2, "evicted"), "as scripted"
    report = await show(site, second["id"])
    assert report["id"] == second["id"]
    [choice] = report["choices"]
    assert (choice["state"], choice["outcome"]) == ("ended", "length")
    cache = choice["cache"]
    assert cache["part"] == "messages[2]"
    assert first["id"] == f"chatcmpl-{cache['earlier_id']}"
    text = httpx.Response(200, json=report).text
    assert "blue" not in text and "red" not in text and "one word" not in text


async def test_all_endpoints_and_ids(site: Site) -> None:
    prompt = {"prompt": "a", "max_tokens": 2}
    said = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "model": "letters"}
    for path, body in (
        ("/v1/completions", prompt),
        ("/v1/completions", prompt | {"request_id": "mine"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", said),
    ):
        answer = await call(site, "POST", path, body)
        assert answer.status_code == 200, answer.text
        assert len((await show(site, answer.json()["id"]))["choices"]) == 1
        if path != "/v1/responses" and "request_id" not in body:
            assert await show(site, answer.headers["x-request-id"])
    assert await show(site, "mine")


async def test_every_choice_has_its_report(site: Site) -> None:
    body = {"prompt": ["first", "second"], "n": 2, "max_tokens": 2}
    answer = await call(site, "POST", "/v1/completions", body)
    choices = (await show(site, answer.json()["id"]))["choices"]
    assert [choice["prompt_tokens"] for choice in choices] == [6, 6, 7, 7]


async def test_usage_at_the_end_of_a_stream(site: Site) -> None:
    body = {
        "prompt": "hello",
        "stream": True,
        "stream_options": {"include_usage": True},
        "baton_usage": True,
        "max_tokens": 3,
    }
    answer = await call(site, "POST", "/v1/completions", body)
    usage = events(answer.text)[-1]["usage"]
    assert usage["baton"]["cache"]["reason"] == "shorter_than_a_block"


async def test_a_key_sees_its_own_requests_and_the_rest_as_if_they_did_not_exist(
    locked: Site,
) -> None:
    anna, ben = KEYS
    name = (await chat(locked, "Hi", key=anna))["id"]
    report = await show(locked, name, key=anna)
    assert report["choices"][0]["client"] == name_of(digest(anna.encode()))
    other = await call(locked, "GET", f"/v1/requests/{name}", key=ben)
    absent = await call(locked, "GET", f"/v1/requests/{name[::-1]}", key=ben)
    assert other.status_code == absent.status_code == 404
    assert other.text.replace(name, "") == absent.text.replace(name[::-1], "")
    assert (await call(locked, "GET", f"/v1/requests/{name}")).status_code == 401


async def test_two_keys_with_equal_prompts_are_told_the_same(locked: Site) -> None:
    """A key gets the explanation that it would get if the other had never asked."""
    anna, ben = KEYS
    told = []
    for _ in range(2):
        await chat(locked, "What is red?", "And green?", key=anna)
        body = await chat(locked, "What is red?", "And blue?", key=ben, baton_usage=True)
        told.append(body["usage"]["baton"]["cache"])
    assert told[0]["longest_match"] == 0
    assert told[0]["reason"] == "not_remembered", "the scripted worker's two cached tokens"
    assert told[1]["longest_match"] > 20, "its own prompt before"


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 200), ("::1", 200), ("10.0.0.9", 404)])
async def test_without_keys_this_machine_sees_all(site: Site, host: str, status: int) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    answer = await call(site, "POST", "/v1/completions", body, host="10.0.0.8")
    name = answer.json()["id"]
    for who, expected in (("10.0.0.8", 200), (host, status)):
        found = await call(site, "GET", f"/v1/requests/{name}", host=who)
        assert found.status_code == expected


async def test_a_request_of_another_process_is_found_there(site: Site) -> None:
    asked = list[Any]()

    def answer(question: Any) -> object:
        asked.append(question)
        return RequestReport("there", []) if question.name == "there" else None

    async with sibling(site, answer) as channel:
        await show(site, (await chat(site, "Hi"))["id"])
        assert asked == []
        assert await show(site, "there") == {"id": "there", "choices": [], "object": "request"}
        assert (await call(site, "GET", "/v1/requests/nowhere")).status_code == 404
        name = (await chat(site, "Ho"))["id"]
        question = Find("report", None, name)
        report = await channel.ask(question, RequestReport)
        assert report.id == name and len(report.choices) == 1
