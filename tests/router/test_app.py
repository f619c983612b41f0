"""The whole router on real sockets, with scripted workers; and the process itself."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from router.app import Router, serve, with_room
from router.config import Config, split_endpoint
from router.core.request import Request
from scripts.tcp_client import connect
from tests.router.scripted import RecordingSink, ScriptedWorker, first, usage
from tests.router.site import ids, write_model
from wire.errors import ErrorCode, WireError
from wire.frames import (
    ANY_RANK,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Frame,
    PrefillDone,
    PrefillRequest,
    Role,
    Tag,
)
from wire.options import Options
from wire.parts import Message
from wire.payloads import encode_prompt
from wire.process.model import fingerprint

OPEN = {"http": "127.0.0.1:0", "tcp": "127.0.0.1:0", "bus": "tcp://127.0.0.1:0"}


class Running:
    """A started router and its two scripted workers."""

    def __init__(self, router: Router, model: Path) -> None:
        self.router = router
        bus, digest = router.endpoints["bus"], fingerprint(model)
        self.prefill = ScriptedWorker(bus, Role.PREFILL, fingerprint=digest)
        self.decode = ScriptedWorker(bus, Role.DECODE, fingerprint=digest)

    async def until_joined(self) -> None:
        for worker in (self.prefill, self.decode):
            await worker.hear(Tag.WELCOME)

    async def answer(self, token_ids: list[int]) -> None:
        """Serve one request with these tokens."""
        message = await self.prefill.hear(Tag.PREFILL_REQUEST)
        request_id = message.frame.request_id  # type: ignore[attr-defined]
        self.prefill.say(PrefillDone(request_id, 0), first(token_ids[0]))
        await self.decode.hear(Tag.DECODE_REQUEST)
        for token_id in token_ids[1:]:
            self.decode.say([DecodeToken(request_id, token_id)])
        self.decode.say(DecodeDone(request_id), usage("stop"))


@asynccontextmanager
async def running(directory: Path, **settings: object) -> AsyncIterator[Running]:
    model = write_model(directory)
    of_ours = {"model": str(model), "heartbeat_ms": 60_000}  # scripted workers beat once
    config = Config(**OPEN | of_ours | settings)  # type: ignore[arg-type]
    router = Router(config, model, fingerprint(model))
    try:
        await router.start()
        cluster = Running(router, model)
        await cluster.until_joined()
        yield cluster
        await cluster.prefill.link.close()
        await cluster.decode.link.close()
    finally:
        await router.close()


async def test_one_answer_over_http_and_one_over_tcp(tmp_path: Path) -> None:
    async with running(tmp_path, ready_file=tmp_path / "ready") as cluster:
        endpoints = json.loads((tmp_path / "ready").read_text())
        assert endpoints == cluster.router.endpoints
        async with httpx.AsyncClient(base_url=endpoints["http"], timeout=60) as client:
            post = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 9})
            response, _ = await asyncio.gather(post, cluster.answer(ids(" upon")))
            assert response.json()["choices"][0]["text"] == " upon"
        async with await connect(*split_endpoint(endpoints["tcp"])) as client:
            client.send(PrefillRequest(5, 2, ANY_RANK), encode_prompt([3, 4], Options()))
            client.send(DecodeRequest(5, 8))
            await cluster.answer([6, 7])
            frames = [await next_frame(client) for _ in range(3)]
            assert frames == [PrefillDone(5, 0), DecodeToken(5, 7), DecodeDone(5)]
        async with httpx.AsyncClient(base_url=endpoints["http"], timeout=60) as client:
            lines = (await client.get("/metrics")).text.splitlines()
        for plane, tag, direction, count in (
            ("bus", "prefill_request", "sent", 2),
            ("bus", "prefill_done", "received", 2),
            ("tcp", "prefill_request", "received", 1),
            ("tcp", "prefill_done", "sent", 1),
        ):
            labels = f'direction="{direction}",plane="{plane}",tag="{tag}"'
            assert f"baton_frames_total{{{labels}}} {count}.0" in lines


async def next_frame(client: object) -> Frame:
    message = await client.next_message()  # type: ignore[attr-defined]
    assert isinstance(message, Message)
    return message.frame


async def test_open_requests_end_before_the_router_stops(tmp_path: Path) -> None:
    async with running(tmp_path, drain_s=60.0) as cluster:
        sink = RecordingSink()
        cluster.router.dispatcher.submit(Request((1, 2), Options(), 4), sink)
        draining = asyncio.create_task(cluster.router.drain())
        await asyncio.sleep(0)
        with pytest.raises(WireError) as caught:
            cluster.router.dispatcher.submit(Request((1, 2), Options(), 4), RecordingSink())
        assert caught.value.code is ErrorCode.DRAINING
        async with httpx.AsyncClient(
            base_url=cluster.router.endpoints["http"], timeout=60
        ) as client:
            response = await client.get("/readyz")
            assert response.status_code == 503 and "draining" in response.text
        await cluster.answer([5, 6])
        await draining
        assert sink.kinds == ["prefill", "token", "done"]


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        for field in ("http", "tcp", "bus"):
            address = f"tcp://{endpoint}" if field == "bus" else endpoint
            config = Config(**OPEN | {"model": str(model), field: address})  # type: ignore[arg-type]
            router = Router(config, model, "f00d")
            with pytest.raises(OSError, match=endpoint):
                await router.start()
            await router.close()
        config = Config(**OPEN | {"model": str(model), "tcp": endpoint})  # type: ignore[arg-type]
        assert await serve(config, model, "f00d", asyncio.Event()) == 1


async def test_a_part_that_breaks_ends_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as cluster:
        monkeypatch.setattr(cluster.router.bus, "tick", lambda: 1 / 0)
        assert not await cluster.router.until_stopped(asyncio.Event())


@contextmanager
def process(
    directory: Path, *flags: str, before: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The router as a process that listens, and where it serves HTTP."""
    ready = directory / "ready"
    command = [*before, sys.executable, "-m", "router", "--model", str(write_model(directory))]
    command += ["--ready-file", str(ready), *flags]
    command += [f"--{name}={endpoint}" for name, endpoint in OPEN.items()]
    started = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert started.stderr is not None
        while b"listening" not in started.stderr.readline():
            assert started.poll() is None
        yield started, json.loads(ready.read_text())["http"]
    finally:
        started.kill()
        started.communicate()


def test_the_process_serves_and_drains_on_sigterm(tmp_path: Path) -> None:
    with process(tmp_path) as (router, url):
        assert httpx.get(f"{url}/livez", timeout=60).status_code == 200
        assert httpx.get(f"{url}/readyz", timeout=60).status_code == 503
        router.send_signal(signal.SIGTERM)
        _, log = router.communicate(timeout=30)
        assert router.returncode == 0, log


@pytest.mark.parametrize(
    ("num_files", "tls", "most"),
    [
        (1 << 20, None, 4096),
        (8448, None, 4096),
        (8447, None, 4095),
        (8448, Path("cert.pem"), 2048),
        (512, None, 128),
        (64, None, 16),
        (2, None, 1),
    ],
)
def test_clients_leave_files_to_others(num_files: int, tls: Path | None, most: int) -> None:
    config = Config(tls_cert=tls, tls_key=tls)
    with capture_logs() as logs:
        assert with_room(config, num_files).max_connections == most
    warned = [(each["max_connections"], each["open_files"]) for each in logs]
    assert warned == ([] if most == 4096 else [(most, num_files)])
