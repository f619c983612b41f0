"""The whole HTTP face over the real core, in memory and on a real uvicorn."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from router.api.chat import ChatAnswer
from router.api.model import ServedModel
from router.api.responses.store import KeptResponse
from router.core.cluster import ProcessState
from router.core.state import Limits
from router.http.limits import INLINE_BYTES, Bodies
from router.http.origin import Origins
from router.page.activity import Activity
from router.processes.channel import Ask, AskActivity, Find
from router.processes.merged_metrics import Family
from tests.circles import circles
from tests.router.api.messages.stream import message_of, read_events
from tests.router.http.sibling import sibling
from tests.router.scripted import Ends
from tests.router.site import Answer, Site, events, listening, write_model
from wire.errors import ErrorCode
from wire.frames import Cancel
from wire.process.api_keys import ApiKeys, digest, name_of

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(write_model(tmp_path))


async def post(site: Site, path: str, body: Any, **headers: str) -> httpx.Response:
    async with site.client() as client:
        return await client.post(path, json=body, headers=headers)


async def complete(site: Site, **fields: Any) -> Any:
    answer = await post(site, "/v1/completions", {"prompt": "ab"} | fields)
    assert answer.status_code == 200, answer.text
    return events(answer.text) if fields.get("stream") else answer.json()


async def chat(site: Site, **fields: Any) -> Any:
    answer = await post(site, "/v1/chat/completions", CHAT | fields)
    assert answer.status_code == 200, answer.text
    return events(answer.text) if fields.get("stream") else answer.json()


async def test_a_completion(site: Site) -> None:
    body = await complete(site)
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert body["system_fingerprint"].startswith("fp_")
    assert body["service_tier"] is None


@pytest.mark.parametrize("ask", [complete, chat])
async def test_a_stream_says_what_the_whole_says(site: Site, ask: Any) -> None:
    site.answer = lambda prompt: Answer("héllo 日本 🎉")
    whole = (await ask(site, max_tokens=50))["choices"][0]
    chunks = await ask(site, max_tokens=50, stream=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [c.get("text", c.get("delta", {}).get("content", "")) for c in choices]
    assert (
        "".join(texts)
        == "héllo 日本 🎉"
        == whole.get("text", whole.get("message", {}).get("content"))
    )
    num_tokens = len("héllo 日本 🎉".encode())
    assert len(texts) in (num_tokens, num_tokens + 1), (
        "a chunk for every token, maybe the end alone"
    )
    assert [c["finish_reason"] for c in choices][-1] == whole["finish_reason"] == "stop"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


async def test_a_stop_string_cancels_on_the_worker(site: Site) -> None:
    body = await complete(site, stop=["zz", "lo"])
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("hel", "stop")
    site.answer = lambda prompt: Answer("hello", hangs_after=5)
    chunks = await complete(site, stop="lo", stream=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hel"
    assert site.frames(Cancel)
    assert site.bus.dispatcher.num_running == 0


# Anthropic's API.

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PROMPT = {"model": "letters", "messages": CHAT["messages"]}
MESSAGE: dict[str, Any] = PROMPT | {"max_tokens": 9}


async def test_a_message(site: Site) -> None:
    answer = await post(site, MESSAGES, MESSAGE, **{"anthropic-version": "2023-06-01"})
    body = answer.json()
    assert (body["type"], body["content"]) == ("message", [{"type": "text", "text": "hello"}])
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    streamed = await post(site, MESSAGES, MESSAGE | {"stream": True})
    message = message_of(read_events(streamed.content))
    assert {name: message[name] for name in body if name != "id"} == {
        name: body[name] for name in body if name != "id"
    }


@pytest.mark.parametrize(("path", "asked"), [(MESSAGES, MESSAGE), (COUNT, PROMPT)])
@pytest.mark.usefixtures("guarded")
async def test_errors_of_messages_have_anthropics_format(
    site: Site, path: str, asked: dict[str, Any]
) -> None:
    headers = {"x-api-key": "sk-0123456789abcdef", "content-type": "application/json"}
    wrong: list[tuple[int, str, bytes, dict[str, str]]] = [
        (401, "authentication_error", b"", {"x-api-key": "sk-none"}),
        (403, "permission_error", b"", {"origin": "http://evil.example"}),
        (415, "invalid_request_error", b"", {"content-type": "text/plain"}),
        (400, "invalid_request_error", b"{", {}),
        (400, "invalid_request_error", b"{}", {}),
        (400, "invalid_request_error", json.dumps(asked).encode(), {"anthropic-version": "1"}),
        (404, "not_found_error", json.dumps(asked | {"model": "x"}).encode(), {}),
        (413, "request_too_large", b"[" + b"{}," * 40_000 + b"{}]", {}),
    ]
    async with site.client() as client:
        answers = [(await client.get(path, headers=headers), 405, "invalid_request_error")]
        for status, kind, content, more in wrong:
            answer = await client.post(path, content=content, headers=headers | more)
            answers.append((answer, status, kind))
    for answer, status, kind in answers:
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["request_id"] == answer.headers["request-id"]


# Errors.


async def test_a_compressed_body(site: Site) -> None:
    kind = {"content-type": "application/json", "content-encoding": "gzip"}
    async with site.client() as client:
        ask = partial(client.post, "/v1/completions", headers=kind)
        answer = await ask(content=gzip.compress(b'{"prompt": "ab"}'))
        assert answer.json()["choices"][0]["text"] == "hello"
        for raw, status in ((b"{}", 400), (gzip.compress(bytes(3 << 20)), 413)):
            answer = await ask(content=raw)
            assert (answer.status_code, answer.headers["connection"]) == (status, "close")
        answer = await ask(content=b"", headers=kind | {"content-encoding": "br"})
        assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate")


PAGE = "https://chat.example.org"


async def test_a_web_page_that_is_allowed(site: Site, guarded: Path) -> None:
    """It is told so before it asks, which it does without its key, and with each answer."""
    site.configure(origins=Origins([PAGE]))
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    key = {"authorization": "Bearer sk-0123456789abcdef"}
    async with site.client() as client:
        client.headers["origin"] = PAGE
        first = await client.options("/v1/completions", headers=ask)
        assert first.status_code == 200
        assert "POST" in first.headers["access-control-allow-methods"]
        assert first.headers["access-control-allow-headers"] == "x-a"
        body = {"prompt": "ab"}
        for answer, status in (
            (first, 200),
            (await client.post("/v1/completions", json=body, headers=key), 200),
            (await client.post("/v1/completions", json=body | {"stream": True}, headers=key), 200),
            (await client.post("/v1/completions", json={}, headers=key), 400),
            (await client.post("/v1/completions", json=body), 401),
        ):
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["vary"] == "Origin"
        assert (await client.options("/v1/models")).status_code == 401, "no preflight"
        client.headers["origin"] = "https://evil.example"
        refused = await client.options("/v1/completions", headers=ask)
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers


async def test_no_worker_and_too_many_requests(tmp_path: Path) -> None:
    empty = Site(write_model(tmp_path), join=False)
    answer = await post(empty, "/v1/chat/completions", CHAT)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "no_worker"
    full = Site(tmp_path, limits=Limits(max_waiting=0, max_running_per_worker=1))
    answer = await post(full, "/v1/chat/completions", CHAT | {"n": 2})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert full.bus.dispatcher.num_running == 0


async def test_a_failure_in_the_middle_ends_the_stream_in_words(site: Site) -> None:
    site.answer = lambda prompt: Answer(fails_after=3, error=ErrorCode.TRANSFER_FAILED)
    chunks = await chat(site, stream=True)
    assert chunks[-1]["error"]["code"] == "transfer_failed"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    answer = await post(site, "/v1/chat/completions", CHAT)
    assert answer.status_code == 500


async def test_a_bug_is_a_500_that_says_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(model: ServedModel, raw: bytes) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr("router.http.application.detokenize", boom)
    with capture_logs() as logs:
        answer = await post(site, "/detokenize", {"tokens": []})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in answer.text
    assert [entry["event"] for entry in logs] == ["bug", "request"]


async def test_a_stream_that_breaks_by_our_own_fault_says_so_and_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(self: ChatAnswer) -> bytes:
        raise RuntimeError("secret")

    monkeypatch.setattr(ChatAnswer, "end", boom)
    with capture_logs() as logs:
        chunks = await chat(site, stream=True)
    assert "choices" in chunks[0] and chunks[-1]["error"]["code"] == "internal"
    assert "secret" not in chunks[-1]["error"]["message"]
    line = logs[-1]
    assert (line["event"], line["status"], line["outcome"]) == ("request", 500, "internal")


# Around a request.


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions"])
async def test_a_long_body_is_read_in_a_thread(
    site: Site, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the loop goes on meanwhile: here the thread waits for something that the loop does."""
    done, readers, bodies = threading.Event(), [], Bodies()

    def check_name(self: ServedModel, model: str | None) -> None:
        assert done.wait(60)
        readers.append(threading.current_thread())

    monkeypatch.setattr(ServedModel, "check_name", check_name)
    site.configure(bodies=bodies)
    body = {"prompt": "x", "tokens": [1], "user": "x" * INLINE_BYTES}
    asking = asyncio.create_task(post(site, path, body))
    while not bodies.total_bytes:  # noqa: ASYNC110 (there is no event for it)
        await asyncio.sleep(0)
    done.set()
    assert (await asking).status_code == 200
    assert readers != [threading.main_thread()] and len(readers) == 1
    assert bodies.total_bytes == 0
    await post(site, path, {"prompt": "x", "tokens": [1]})
    assert readers[1] is threading.main_thread()


async def test_one_line_a_request(site: Site) -> None:
    headers = {"x-request-id": "mine", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    with capture_logs() as logs:
        answer = await post(site, "/v1/completions", {"prompt": "ab"}, **headers)
    [line] = [entry for entry in logs if entry["event"] == "request"]
    assert answer.headers["x-request-id"] == line["request_id"] == "mine"
    assert (line["endpoint"], line["status"], line["outcome"]) == ("completions", 200, "stop")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (3, 5)
    assert "ab" not in json.dumps(line["outcome"])
    assert line["traceparent"] == headers["traceparent"] and "traceparent" not in answer.headers


async def test_metrics_count_it(site: Site) -> None:
    await complete(site, stream=True)
    async with site.client() as client:
        text = (await client.get("/metrics")).text
    assert 'baton_http_requests_total{endpoint="completions",outcome="stop"} 1.0' in text
    assert 'baton_requests_total{outcome="stop"} 1.0' in text
    assert re.search(r"^baton_tasks [1-9]", text, re.M)
    assert re.search(r"^baton_python_blocks [1-9]", text, re.M)


# On a real server.


def request_bytes(body: Any, path: str = "/v1/chat/completions", *headers: str) -> bytes:
    raw = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(raw)}", "", ""]).encode() + raw


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_a_client_that_goes_away_is_noticed_while_nothing_of_it_is_read(
    site: Site, how: str, is_streamed: bool
) -> None:
    """A request that comes while another is answered has uvicorn pause its reading."""
    site.answer = lambda prompt: Answer("hello", hangs_after=2)
    async with listening(site.application) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.write(request_bytes(CHAT | {"stream": is_streamed}))
        await asyncio.wait_for(site.asked.wait(), 30)
        writer.write(request_bytes(CHAT) + b"GET /livez HTTP/1.1\r\n")
        await complete(site, max_tokens=1)  # by then what came before is read
        if how == "half-close":
            writer.write_eof()
        elif how == "reset":
            writer.transport.abort()
        else:
            writer.close()
        await asyncio.wait_for(site.cancelled.wait(), 30)
        await site.idle()
        writer.close()


@pytest.fixture
def guarded(site: Site, tmp_path: Path) -> Path:
    """The site with API keys; their file."""
    path = tmp_path / "api_keys"
    path.write_text("sk-0123456789abcdef\n")
    path.chmod(0o600)
    site.configure(api_keys=ApiKeys(path))
    return path


WRONG = [
    {},
    {"authorization": "Bearer sk-0123456789abcdeg"},
    {"authorization": "Basic sk-0123"},
    {"x-api-key": "sk-0123456789abcdeg"},
    {"x-api-key": "", "authorization": "Bearer "},
]


@pytest.mark.parametrize("headers", WRONG)
@pytest.mark.parametrize("path", ["/v1/completions", "/metrics", "/x"])
@pytest.mark.usefixtures("guarded")
async def test_without_a_key_there_is_nothing(
    site: Site, path: str, headers: dict[str, str]
) -> None:
    async with site.client() as client:
        answer = await client.get(path, headers=headers)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "sk-" not in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-0123456789abcdef"},
        {"x-api-key": "sk-0123456789abcdef"},
        {"x-api-key": "sk-0123456789abcdef", "authorization": "Bearer none"},
    ],
)
async def test_with_a_key_there_is_everything_until_it_is_revoked(
    site: Site, guarded: Path, headers: dict[str, str]
) -> None:
    async with site.client() as client:
        body = {"model": "letters", "prompt": "x", "max_tokens": 5}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        await asyncio.to_thread(guarded.write_text, "sk-another-key-of-another\n")
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", CHAT | {"model": "letters", "max_tokens": 5}),
    ],
)
async def test_the_salt_for_workers_depends_on_key_and_request(
    site: Site, guarded: Path, path: str, body: dict[str, Any]
) -> None:
    keys = ApiKeys(guarded)
    salt_of = partial(keys.cache_salt, digest(b"sk-0123456789abcdef"))
    for api_keys, expected in (
        (keys, [salt_of(""), salt_of("mine")]),
        (ApiKeys(guarded, shares_prefixes=True), ["", "mine"]),
        (None, ["", "mine"]),
    ):
        site.configure(api_keys=api_keys)
        site.salts.clear()
        for fields in ({}, {"cache_salt": "mine"}):
            answer = await post(site, path, body | fields, **{"x-api-key": "sk-0123456789abcdef"})
            assert answer.status_code == 200, answer.text
        assert site.salts == expected


@pytest.mark.usefixtures("guarded")
async def test_requests_are_their_key_s_wherever_they_come_from(site: Site) -> None:
    site.bus.dispatcher.observers.append(ends := Ends())
    key = "sk-0123456789abcdef"
    async with site.client() as client:
        body = {"model": "letters", "prompt": "x", "max_tokens": 5}
        headers = {"authorization": f"Bearer {key}"}
        assert (await client.post("/v1/completions", json=body, headers=headers)).is_success
    [end] = ends.ends
    assert end.client == name_of(digest(key.encode())) and "0123456789abcdef" not in end.client


@pytest.mark.usefixtures("guarded")
async def test_probes_need_no_key(site: Site) -> None:
    async with site.client() as client:
        for path in ("/livez", "/readyz", "/health", "/ping", "/openapi.json", "/docs"):
            assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("how", "status", "fields"),
    [
        ("streamed", 200, {"stream": True}),
        ("whole", 200, {}),
        ("stopped", 200, {"stream": True, "stop": "l"}),
        ("scored", 200, {"stream": True, "logprobs": 2, "n": 2}),
        ("refused", 503, {}),
        ("failed", 200, {"stream": True}),
        ("left", 200, {"stream": True}),
        ("failed at once", 503, {"stream": True}),
        ("left, with more asked", 200, {"stream": True}),
    ],
)
async def test_nothing_of_a_request_that_ended_waits_for_the_garbage_collector(
    site: Site, how: str, status: int, fields: dict[str, object]
) -> None:
    """It would stop the router for as long as many have ended."""
    site.answer = lambda prompt: Answer(
        "hello" * 40,
        fails_after={"failed": 8, "failed at once": 0}.get(how),
        hangs_after=8 if "left" in how else None,
    )
    site.bus.dispatcher.is_draining = how == "refused"
    body = {"prompt": "ab", "max_tokens": 100} | fields
    closing = () if "left" in how else ("connection: close",)
    asked = request_bytes(body, "/v1/completions", *closing)
    async with listening(site.application) as address:
        with circles() as found:
            for _ in range(3):  # of the last one, the server may not have seen the end
                reader, writer = await asyncio.open_connection(*address)
                writer.write(asked * (2 if "more" in how else 1))
                assert await reader.readuntil(b" ") == b"HTTP/1.1 "
                assert int(await reader.readuntil(b" ")) == status
                if "left" in how:
                    site.cancelled.clear()
                    writer.transport.abort()
                    await asyncio.wait_for(site.cancelled.wait(), 30)
                else:
                    await reader.read()
                    writer.close()
        assert not found


async def test_other_processes_of_the_router_are_answered(site: Site) -> None:
    async with sibling(site, lambda question: None) as parent:
        assert (await parent.ask(Ask.STATE, ProcessState)).pid == os.getpid()
        names = {each.name for each in await parent.ask(Ask.METRICS, list[Family])}
        assert "baton_requests_running" in names
        assert (await parent.ask(AskActivity(0.0), Activity)).rows == []
        async with site.client() as client:
            asked = await client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 1})
        maybe: Any = KeptResponse | None
        name = asked.json()["id"]
        for asker, is_theirs in (("ben", False), ("127.0.0.1", True)):
            found = await parent.ask(Find("response", asker, name), maybe)
            assert (found is not None) == is_theirs
            assert await parent.ask(Find("delete", asker, name), bool) == is_theirs
        assert await parent.ask(Find("response", "127.0.0.1", name), maybe) is None
