"""The port for /metrics: responses, API keys and limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from wire.process.api_keys import ApiKeys
from wire.process.scrape import MAX_CONNECTIONS, MAX_HEAD_BYTES, ScrapePort

KEY = "sk-" + "1" * 40


@asynccontextmanager
async def listening(
    api_keys: ApiKeys | None = None, patience_s: float = 60.0, *, is_alive: bool = True
) -> AsyncIterator[ScrapePort]:
    port = ScrapePort(lambda: b"baton_x 1\n", lambda: is_alive, api_keys, patience_s)
    await port.listen("127.0.0.1:0")
    try:
        yield port
    finally:
        await port.close()


async def ask(port: ScrapePort, path: str = "/metrics", method: str = "GET", **more: str) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        url = f"http://127.0.0.1:{port.port}{path}"
        answer = await client.request(method, url, headers=more)
        return f"{answer.status_code} {answer.text}"


async def raw(port: ScrapePort, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


async def test_metrics_are_served_and_other_requests_refused() -> None:
    async with listening() as port:
        assert await ask(port) == "200 baton_x 1\n"
        assert await ask(port, "/metrics?x=1") == "200 baton_x 1\n"
        assert (await ask(port, "/")).startswith("404")
        assert (await ask(port, method="POST")).startswith("405")


async def test_with_keys_it_asks_for_one(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    async with listening(ApiKeys(path)) as port:
        assert (await ask(port)).startswith("401")
        assert (await ask(port, authorization="Bearer no")).startswith("401")
        assert (await ask(port, authorization=f"Bearer {KEY}")).startswith("200")
        assert await ask(port, "/livez") == "200 alive\n"


async def test_liveness_fails_while_the_engine_is_stuck() -> None:
    async with listening(is_alive=False) as port:
        assert await ask(port, "/livez") == "503 the engine is stuck\n"
        assert (await ask(port)).startswith("200")


@pytest.mark.parametrize("request_", [b"\x00\r\n\r\n", b"GET " + b"x" * 2 * MAX_HEAD_BYTES])
async def test_an_invalid_request_gets_an_error(request_: bytes) -> None:
    async with listening() as port:
        assert (await raw(port, request_))[:10] in (b"HTTP/1.1 4", b"reset")
        assert await ask(port) == "200 baton_x 1\n"


async def test_a_silent_client_is_cut_off() -> None:
    async with listening(patience_s=0.05) as port:
        assert await raw(port, b"GET /metrics HT") in (b"", b"reset")


async def test_connections_are_limited() -> None:
    async with listening() as port:
        silent = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(16)]
        assert len(silent) == MAX_CONNECTIONS
        assert await raw(port, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n") in (b"", b"reset")
        for _, writer in silent:
            writer.close()
            await writer.wait_closed()
        while port.num_open:  # noqa: ASYNC110 - the port tells nobody when one has gone
            await asyncio.sleep(0.001)
        assert await ask(port) == "200 baton_x 1\n"
