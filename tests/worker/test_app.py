"""The life of a worker process: it joins, beats, drains, breaks, and says how it ended."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from msgspec import structs
from structlog.testing import capture_logs

from tests.wire.process.key_files import write
from tests.worker.scripted import (
    EPOCH,
    PATIENCE_S,
    START_S,
    GatedExecutor,
    GatedSteps,
    Process,
    ScriptedRouter,
    heard,
    pair,
    running,
    scripted_router,
)
from wire.errors import ErrorCode
from wire.frames import Cancel, Drain, DrainAsk, Error, Role, Tag
from wire.options import Options
from wire.payloads import decode_prefill_result
from wire.process.cores import own_cores, parse_cores
from wire.process.keys import Keys
from wire.process.settings import EX_CONFIG, EX_LEFT, EX_RESTART, EX_TEMPFAIL, MAX_COUNT
from worker.app import EXIT_CRASHED
from worker.compute.device_errors import EXIT_DEVICE_FAILED

ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(range(100))
OPTIONS = Options(max_tokens=50, ignore_eos=True)


async def first_token(router: ScriptedRouter, request_id: int) -> int:
    router.prefill(request_id, PROMPT, OPTIONS)
    message = await router.receive(Tag.PREFILL_DONE)
    assert message.frame.request_id == request_id  # type: ignore[attr-defined]
    return decode_prefill_result(message.body()).token_id


async def ended(process: Process) -> int:
    return await asyncio.wait_for(process.task, PATIENCE_S)


async def test_hello_and_heartbeat_describe_the_worker() -> None:
    async with scripted_router() as router, running(router, "decode", rank=3, num_blocks=64):
        detail, load = router.details[Role.DECODE], router.loads_by_role[Role.DECODE]
        assert router.peers[Role.DECODE] == b"decode-3-%d" % router.hellos[0].epoch
        assert router.hellos[0].rank == 3
        assert (detail.num_blocks, detail.block_size) == (64, 16)
        assert (detail.arithmetic, detail.threads) == ("hash", 1)
        assert parse_cores(detail.cores) == own_cores()
        assert detail.kv_endpoint.startswith("tcp://127.0.0.1:")
        assert (load.total, load.free, load.used) == (64, 64, 0)


async def test_frames_of_the_bus_are_counted() -> None:
    async with (
        scripted_router() as router,
        running(router, "decode", metrics="127.0.0.1:0") as process,
    ):
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
            answer = await client.get(f"http://127.0.0.1:{process.worker.scrape.port}/metrics")
    lines = answer.text.splitlines()
    for tag, direction in (("hello", "sent"), ("welcome", "received")):
        labels = f'direction="{direction}",plane="bus",tag="{tag}"'
        assert f"baton_frames_total{{{labels}}} 1.0" in lines
    assert 'plane="kv"' not in answer.text


async def test_a_worker_joins_after_its_warmup() -> None:
    executor = GatedSteps()
    executor.close()
    async with scripted_router() as router:
        process = Process(router, "prefill", executor=executor, metrics="127.0.0.1:0")
        try:
            await executor.until_reached()
            async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
                answer = await client.get(f"http://127.0.0.1:{process.worker.scrape.port}/metrics")
            assert 'baton_peers_up{kind="router"} 0.0' in answer.text
            async with running(router, "decode"):  # who dials now is known by now
                assert [hello.role for hello in router.hellos] == [Role.DECODE.value]
                executor.gate.set()
                await router.until_joined(Role.PREFILL)
                # Nor does it say that it stood still meanwhile.
                assert router.loads_by_role[Role.PREFILL].step_ms == 0
                await first_token(router, 1)
                # Else the other may be gone before it hears of the KV, which then waits a lease.
                router.send(Role.PREFILL, Cancel(1, ErrorCode.CANCELLED))
                await router.until_free(Role.PREFILL)
        finally:
            executor.gate.set()
            process.stop.set()
            assert await ended(process) == 0


@pytest.mark.parametrize("broken", ["executor", "draft"])
async def test_a_warmup_that_fails_ends_the_process(broken: str) -> None:
    models = {"executor": GatedExecutor(), "draft": GatedExecutor()}
    models[broken] = GatedExecutor(fail_at=0)
    async with scripted_router() as router:
        with capture_logs() as logs:
            process = Process(router, "decode", speculate="draft:3:small", **models)
            assert await ended(process) == EXIT_CRASHED
        assert router.hellos == []
    [failure] = [line for line in logs if line["event"] == "the warmup failed"]
    assert failure["reason"] == "RuntimeError: the device is gone"


async def test_cached_prefixes_are_announced_again_to_a_router_that_returns() -> None:
    async with scripted_router() as router, running(router, "prefill"):
        router.prefill(1, PROMPT, Options(max_tokens=1))
        await router.until(lambda: len(router.stored) == 6)
        await router.until_free(Role.PREFILL)
        assert len(router.stored) == 6, "once is enough"
        router.send(Role.PREFILL, Error(0, ErrorCode.UNKNOWN_PEER))
        await router.until(lambda: len(router.stored) == 12)
        assert set(router.stored[:6]) == set(router.stored[6:])


async def test_a_drain_ends_when_the_work_and_the_routers_are_done() -> None:
    executor = GatedSteps()
    async with scripted_router() as router:
        decode = Process(router, "decode", executor=executor)
        async with running(router, "prefill"):
            await router.until_joined(Role.DECODE)
            token = await first_token(router, 1)
            executor.pass_one()
            router.decode(1, [*PROMPT, token], 40, OPTIONS)
            await router.tokens(1)
            decode.stop.set()
            await router.until(lambda: len(router.drains) == 1)
            (hello,) = [hello for hello in router.hellos if hello.role is Role.DECODE.value]
            assert router.drains[0].epoch == hello.epoch
            await heard(router)  # the echo of its DRAIN too
            assert not decode.task.done()
            executor.open()
            await router.tokens(39)
            assert await ended(decode) == 0
            await router.until(lambda: router.lost == [router.peers[Role.DECODE]])


async def test_a_drain_waits_for_the_echo() -> None:
    async with scripted_router() as router:
        router.answers_drains = False
        process = Process(router, "prefill")
        await router.until_joined(Role.PREFILL)
        process.stop.set()
        await router.until(lambda: len(router.drains) == 1)
        await router.until_free(Role.PREFILL)  # it still beats
        assert not process.task.done()
        router.send(Role.PREFILL, router.drains[0])
        assert await ended(process) == 0


@pytest.mark.parametrize(
    ("ask", "status"), [(DrainAsk.LEAVE, EX_LEFT), (DrainAsk.RESTART, EX_RESTART)]
)
async def test_a_worker_drains_when_a_router_asks_it_to(ask: DrainAsk, status: int) -> None:
    async with scripted_router() as one, scripted_router() as two:
        process = Process(one, "prefill", router=(one.endpoint, two.endpoint))
        await one.until_joined(Role.PREFILL)
        await two.until_joined(Role.PREFILL)
        one.send(Role.PREFILL, Drain(one.hellos[0].epoch, 0, ask))
        assert await ended(process) == status
        assert one.drains == two.drains == [Drain(one.hellos[0].epoch, 30_000)]


async def test_a_worker_serves_a_leaving_router_and_its_successor() -> None:
    """The successor takes the endpoint over; requests of the old router end where they began."""
    async with scripted_router() as old:
        settings = {"step_delay_s": 0.01, "num_blocks": 2000}
        async with running(old, "prefill"), running(old, "decode", **settings) as decode:
            await old.until_joined(Role.PREFILL, Role.DECODE)
            token = await first_token(old, 1)
            old.decode(1, [*PROMPT, token], 40, OPTIONS)
            await old.tokens(1)
            async with scripted_router(listener=old.hand_over()) as successor:
                assert successor.endpoint == old.endpoint
                successor.epoch = EPOCH + 1
                for role in (Role.PREFILL, Role.DECODE):
                    old.send(role, Drain(EPOCH, 0))
                    old.send(role, Drain(EPOCH, 0))  # said twice, it is one link
                await successor.until_joined(Role.PREFILL, Role.DECODE)
                assert len(successor.hellos) == 2
                assert len(decode.worker.routers) == 2
                await old.tokens(39)
                token = await first_token(successor, 2)
                await old.close()
                await successor.until_free(Role.PREFILL)
                successor.decode(2, [*PROMPT, token], 5, OPTIONS)
                await successor.tokens(5)
                await successor.until_free(Role.DECODE)
                assert len(decode.worker.routers) == 1


async def test_a_worker_meets_the_next_successor_at_once_after_one_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its second link has reached the old router, which does not read it."""
    monkeypatch.setattr("worker.link.REOPEN_S", (600.0,))
    monkeypatch.setattr("worker.link.HELLO_AGAIN_S", 0.1)
    async with scripted_router() as old, running(old, "prefill") as process:
        with capture_logs() as logs:
            old.send(Role.PREFILL, Drain(EPOCH, 0))
            await old.until(
                lambda: "no WELCOME from the router yet" in [it["event"] for it in logs]
            )
        async with scripted_router(listener=old.hand_over()) as successor:
            successor.epoch = EPOCH + 1
            old.send(Role.PREFILL, Drain(EPOCH, 0))
            await successor.until_joined(Role.PREFILL)
            assert len(old.hellos) == 1 and len(process.worker.routers) == 2


async def test_a_draining_worker_does_not_meet_a_successor() -> None:
    async with scripted_router() as old:
        old.answers_drains = False
        process = Process(old, "prefill")
        await old.until_joined(Role.PREFILL)
        process.stop.set()
        await old.until(lambda: len(old.drains) == 1)
        async with scripted_router(listener=old.hand_over()) as successor:
            old.send(Role.PREFILL, Drain(EPOCH, 0))
            await old.load(Role.PREFILL)  # it beats on
            await old.close()  # which ends the drain
            assert await ended(process) == 0
            assert successor.hellos == []


async def test_requests_that_a_drain_cuts_off_are_logged() -> None:
    async with scripted_router() as router, running(router, "prefill"):
        settings = {"step_delay_s": 0.05, "drain_s": 0, "num_blocks": 2000}
        process = Process(router, "decode", **settings)
        await router.until_joined(Role.DECODE)
        token = await first_token(router, 1)
        router.decode(1, [*PROMPT, token], 4000, OPTIONS)  # 200 s
        await router.tokens(1)
        with capture_logs() as logs:
            process.stop.set()
            assert await ended(process) == 0
    (cut,) = [line for line in logs if line["event"] == "not drained in time"]
    assert cut["unfinished"] == 1


@pytest.mark.parametrize(
    ("code", "second", "status"),
    [
        (ErrorCode.MISMATCH, ErrorCode.MISMATCH, EX_CONFIG),
        (ErrorCode.FENCED, ErrorCode.MISMATCH, EX_CONFIG),
        (ErrorCode.FENCED, ErrorCode.FENCED, EX_TEMPFAIL),
    ],
)
async def test_a_worker_that_every_router_refuses_ends(
    code: ErrorCode, second: ErrorCode, status: int
) -> None:
    async with scripted_router() as one, scripted_router() as two:
        process = Process(one, "prefill", router=(one.endpoint, two.endpoint))
        await one.until_joined(Role.PREFILL)
        await two.until_joined(Role.PREFILL)
        one.is_welcoming = two.is_welcoming = False  # a fenced worker asks again, now and then
        one.send(Role.PREFILL, Error(0, code))
        await two.until_free(Role.PREFILL)  # it goes on for the other
        two.send(Role.PREFILL, Error(0, second))
        assert await ended(process) == status


def device_error() -> Exception:
    return torch.AcceleratorError("CUDA error: device-side assert triggered\nFor debugging ...")


async def until_broken(role: str, executor: GatedExecutor) -> int:
    """Give a worker of this role a request; return the exit status of its process."""
    other = "decode" if role == "prefill" else "prefill"
    async with scripted_router() as router, running(router, other):
        process = Process(router, role, executor=executor)
        await router.until_joined(Role.PREFILL, Role.DECODE)
        if role == "prefill":
            router.prefill(1, PROMPT, OPTIONS)
        else:
            router.decode(1, [*PROMPT, await first_token(router, 1)], 40, OPTIONS)
        status = await ended(process)
        # The router sees the loss of the worker, which ends all it had there.
        await router.until(lambda: router.lost == [router.peers[Role[role.upper()]]])
        await router.until_free(Role[other.upper()])
    return status


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_failed_step_ends_the_process(role: str) -> None:
    assert await until_broken(role, GatedExecutor(fail_at=2)) == EXIT_CRASHED


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_gpu_that_fails_in_a_step_is_logged_in_one_line_and_has_its_exit_status(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free() -> None:
        raise device_error()

    executor = GatedExecutor(fail_at=2, problem=device_error())
    monkeypatch.setattr(executor, "shutdown", free)
    with capture_logs() as logs:
        assert await until_broken(role, executor) == EXIT_DEVICE_FAILED
    [line] = [it for it in logs if it["log_level"] == "error"]
    assert line == {
        "log_level": "error",
        "event": "the GPU has failed, so this worker ends",
        "reason": "CUDA error: device-side assert triggered",
        "noticed": f"in forward of a {role} step, batch size 1",
    }


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_gpu_that_fails_in_a_copy_of_kv_ends_the_process(role: str) -> None:
    """Otherwise an idle worker would accept and break one transfer after another."""
    executor = GatedExecutor()
    other = "decode" if role == "prefill" else "prefill"
    async with scripted_router() as router, running(router, other):
        with capture_logs() as logs:
            process = Process(router, role, executor=executor)
            await router.until_joined(Role.PREFILL, Role.DECODE)
            executor.cache.problem = device_error()
            router.prefill(1, PROMPT, OPTIONS)
            assert await ended(process) == EXIT_DEVICE_FAILED
    lines = [it for it in logs if it["event"] == "the GPU has failed, so this worker ends"]
    assert [(it["reason"], it["noticed"]) for it in lines] == [
        ("CUDA error: device-side assert triggered", "in a copy of KV")
    ]


async def test_a_lost_router_ends_its_requests_and_no_others() -> None:
    async with scripted_router() as one, scripted_router() as two:
        endpoints = (one.endpoint, two.endpoint)
        settings = {"router": endpoints, "step_delay_s": 0.002, "num_blocks": 4000}
        async with running(one, "decode", **settings), running(one, "prefill", **settings):
            await two.until_joined(Role.PREFILL, Role.DECODE)
            for request_id, router in ((1, one), (2, two)):
                token = await first_token(router, request_id)
                router.decode(request_id, [*PROMPT, token], 20_000, OPTIONS)  # 40 s
                await router.tokens(2)
            await two.until(lambda: two.beats[Role.DECODE].running == 2)
            await one.close()
            await two.until(lambda: two.beats[Role.DECODE].running == 1)
            await two.tokens(5)
            two.send(Role.DECODE, Cancel(2, ErrorCode.CANCELLED))
            await two.until_free(Role.PREFILL, Role.DECODE)


async def test_systemd_is_notified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "40000")
        loop, heard = asyncio.get_running_loop(), list[str]()
        # Always, as the system drops what does not fit into a short queue.
        loop.add_reader(systemd, lambda: heard.append(systemd.recv(1000).decode()))
        awaited = ("EXTEND_TIMEOUT_USEC=", "READY=1", "WATCHDOG=1", "STATUS=0 running")
        async with pair() as router:
            router.prefill(1, PROMPT, OPTIONS)
            await router.receive(Tag.PREFILL_DONE)
            await router.until(lambda: all(word in "\n".join(heard) for word in awaited))
        loop.remove_reader(systemd)
        assert heard.count("READY=1") <= 2  # of each worker once
        figures = re.compile(r"STATUS=0 running, 0 waiting, 0 blocks used, [1-9]\d* tasks")
        assert all(figures.fullmatch(line) for line in heard if line.startswith("STATUS=0 running"))


def run_worker(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "worker", *args],
        cwd=ROOT,
        env={**os.environ, "BATON_HTTP": "127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--executor=types:SimpleNamespace"], "the executor failed to load"),
        (["--executor=json:loads"], "does not take these settings: missing a required argument"),
        (["--executor=hash", f"--num-blocks={MAX_COUNT}"], "lower --num-blocks to"),
    ],
)
def test_a_model_that_cannot_be_served_ends_the_process(flags: list[str], words: str) -> None:
    ended = run_worker(*flags)
    assert ended.returncode == EX_CONFIG and words in ended.stdout + ended.stderr
    assert "is not a setting" not in ended.stderr


def test_a_taken_address_is_logged_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        ended = run_worker("--executor", "hash", "--kv-bind", endpoint)
    assert ended.returncode == 1
    assert endpoint in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


async def test_heartbeats_have_the_time_of_a_stuck_step() -> None:
    executor = GatedSteps()
    async with scripted_router() as router:
        async with running(router, "prefill", executor=executor):
            peer = router.peers[Role.PREFILL]
            await router.until(lambda: peer in router.loads)
            assert router.loads[peer].step_ms == 0
            executor.gate.clear()
            router.prefill(1, PROMPT, Options(max_tokens=1))
            try:
                await router.until(lambda: router.loads[peer].step_ms >= 300)
            finally:
                executor.gate.set()
            await router.receive(Tag.PREFILL_DONE)
            await router.until(lambda: router.loads[peer].step_ms == 0)


@pytest.mark.parametrize("has_keys", [False, True])
async def test_blocks_outlive_a_worker_encrypted_if_it_has_keys(
    tmp_path: Path, has_keys: bool
) -> None:
    keys, disk = tmp_path / "keys", tmp_path / "disk"
    keys.mkdir()
    cached_tokens: list[int] = []

    async def live() -> None:
        own: dict[str, Any] = {"keys": keys} if has_keys else {}
        async with (
            scripted_router(Keys(keys, "router") if has_keys else None) as router,
            running(router, "prefill", disk_kv=disk, disk_kv_bytes=1 << 20, **own),
        ):
            assert router.details[Role.PREFILL].num_tier_blocks > 100
            router.prefill(1, PROMPT, structs.replace(OPTIONS, max_tokens=1))
            message = await router.receive(Tag.PREFILL_DONE)
            cached_tokens.append(decode_prefill_result(message.body()).cached_tokens)

    for _ in range(2):
        shutil.rmtree(keys)
        keys.mkdir()
        write(keys, "router", "prefill-0")
        for _ in range(2):
            await live()
    # The second pair of keys cannot open what the first has written.
    assert cached_tokens == ([0, 96, 0, 96] if has_keys else [0, 96, 96, 96])
    tokens = b"".join(it.to_bytes(4, "little") for it in PROMPT[:16])
    headers = next(disk.rglob("headers")).read_bytes()
    assert (tokens in headers) != has_keys
