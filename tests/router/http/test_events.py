"""The stream behind the page, over a real connection."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from router.http import events
from router.page.activity import Activity
from router.processes.channel import Answers, AskActivity
from tests.router.http.serving import ask
from tests.router.http.sibling import sibling
from tests.router.page.activities import activity, row
from tests.router.site import Site, listening, write_model
from wire.process.api_keys import ApiKeys

ASK = b"GET /v1/cluster/events HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(events, "TICK_S", 0.01)
    return Site(write_model(tmp_path))


class Viewer:
    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def next(self) -> tuple[str, dict[str, Any]]:
        """The next event: its name and data."""
        name = await self._reader.readuntil(b"\n")
        while not name.startswith(b"event: "):
            name = await self._reader.readuntil(b"\n")
        data = await self._reader.readuntil(b"\n")
        return name.decode().split()[1], json.loads(data.removeprefix(b"data: "))

    async def end(self) -> None:
        while not (await self._reader.readuntil(b"\n")).startswith(b"0\r"):
            pass


@asynccontextmanager
async def viewer(address: tuple[str, int], header: bytes = b"") -> AsyncIterator[Viewer]:
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    writer.write(ASK + header + b"\r\n")
    try:
        yield Viewer(reader)
    finally:
        writer.close()
        await writer.wait_closed()


async def until_nobody_counts(site: Site, before: int) -> None:
    async with asyncio.timeout(30):
        while len(site.bus.dispatcher.observers) != before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_snapshot_then_changes_and_nothing_once_nobody_looks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(site.bus.dispatcher.observers)
    async with listening(site.application) as address, asyncio.timeout(30):
        async with viewer(address) as watching:
            name, data = await watching.next()
            assert name == "snapshot" and set(data["workers"]) == {"prefill-0", "decode-0"}
            assert (data["model"], data["has_chat"], data["requests"]) == ("letters", True, [])
            async with site.client() as client:
                headers = {"x-request-id": "mine"}
                secret = {"prompt": "a secret", "max_tokens": 3}
                assert (
                    await client.post("/v1/completions", json=secret, headers=headers)
                ).status_code == 200
            rows: dict[str, Any] = {}
            while "total_s" not in rows:
                name, data = await watching.next()
                assert name == "delta" and "secret" not in str(data)
                for row in data["requests"]:
                    rows |= row
            assert (rows["id"], rows["state"], rows["tokens"]) == ("mine", "length", 3)
            assert len(site.bus.dispatcher.observers) == before + 1
            monkeypatch.setattr(events, "IDLE_S", 0.05)  # from the next look
            # A second viewer shares the events, and begins with a snapshot.
            async with viewer(address) as other:
                name, data = await other.next()
                assert name == "snapshot" and [row["id"] for row in data["requests"]] == ["mine"]
                await other.next()
        await until_nobody_counts(site, before)


async def test_a_drain_ends_the_stream(site: Site) -> None:
    async with listening(site.application) as address, asyncio.timeout(30):
        async with viewer(address) as watching:
            await watching.next()
            site.application.draining = True
            await watching.end()
    site.configure()  # whose first look is during the drain
    site.application.draining = True
    async with listening(site.application) as address, asyncio.timeout(30):
        async with viewer(address) as watching:
            _, data = await watching.next()
            assert "the router is draining" in data["router"]["reasons"]
            await watching.end()


async def test_a_revoked_key_ends_the_stream(site: Site, tmp_path: Path) -> None:
    (path := tmp_path / "api_keys").write_text("the-key-of-a-viewer\nanother-key-of-ours\n")
    path.chmod(0o600)
    site.configure(api_keys=ApiKeys(path))
    async with listening(site.application) as address, asyncio.timeout(30):
        async with viewer(address, b"authorization: Bearer the-key-of-a-viewer\r\n") as watching:
            await watching.next()
            await watching.next()
            path.write_text("another-key-of-ours\n")
            await watching.end()


async def test_too_many_viewers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_VIEWERS", 1)
    async with listening(site.application) as address, asyncio.timeout(30):
        async with viewer(address) as watching:
            await watching.next()
            async with site.client() as client:
                answer = await client.get("/v1/cluster/events")
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert answer.json()["error"]["code"] == "overloaded"


async def test_a_viewer_who_was_slow_gets_a_snapshot_and_no_queue(site: Site) -> None:
    """One that takes nothing for some looks is behind by more than one event."""
    held, sent = asyncio.Event(), list[bytes]()

    async def send(event: dict[str, Any]) -> None:
        if event["type"] == "http.response.body" and event["body"]:
            sent.append(event["body"].split(b"\n")[0])
            if len(sent) == 2:
                await held.wait()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/v1/cluster/events"}
    scope["headers"] = [(b"host", b"localhost")]
    serving = asyncio.ensure_future(site.application(scope, receive, send))  # type: ignore[arg-type]
    async with listening(site.application) as address, asyncio.timeout(30):
        async with viewer(address) as quick:
            while len(sent) < 2:
                await quick.next()
            for _ in range(5):
                await quick.next()
            held.set()
            while len(sent) < 4:
                await quick.next()
    serving.cancel()
    assert sent[:4] == [b"event: snapshot", b"event: delta", b"event: snapshot", b"event: delta"]


async def test_the_page_and_a_head(site: Site) -> None:
    async with site.client() as client:
        page = await client.get("/")
        assert page.text.startswith("<!doctype html>") and "letters" not in page.text
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-security-policy"].startswith("default-src 'none'; ")
        head = await client.head("/v1/cluster/events")
        assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
    async with listening(site.application) as (host, port):
        del host
        request = b"HEAD / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answer = await ask(type("Server", (), {"port": port})(), request)
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n")


async def test_a_process_that_replies_late_loses_no_request(site: Site) -> None:
    start, looks = time.monotonic(), count(1)

    def answer(question: AskActivity) -> Answers[Activity]:
        look = next(looks)
        if look == 1:
            return Answers([activity(start, row("7-1"), pid=7)], is_complete=True)
        if look == 2:
            return Answers([], is_complete=False)
        ended = [row("7-1", "stop", total_s=1.0)] if question.since <= start else []
        return Answers([activity(time.monotonic(), *ended, pid=7)], is_complete=True)

    async with (
        sibling(site, answer),
        listening(site.application) as address,
        asyncio.timeout(30),
        viewer(address) as watching,
    ):
        name, data = await watching.next()
        assert name == "snapshot" and [each["key"] for each in data["requests"]] == ["7-1"]
        while not data["requests"] or name == "snapshot":
            name, data = await watching.next()
        assert [(each["key"], each.get("total_s")) for each in data["requests"]] == [("7-1", 1.0)]
