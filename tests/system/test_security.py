"""A real cluster with keys lets their holders in, and others can do it no harm."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import zmq

from tests.cluster import ROOT, START_S, Cluster, kv_endpoint, until
from tests.system.locked import Locked
from tests.worker.scripted import ScriptedPrefill
from wire.aio.port import client_options, new_key_pair
from wire.process.keys import Keys

MIB = 1 << 20
MAX_GROWTH = 16 * MIB


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    with Locked(tmp_path_factory.mktemp("locked")) as cluster:
        yield cluster


def test_local_workers_have_their_keys_and_serve(locked: Locked) -> None:
    # A prompt of its own: what another test has sent may be in the decode worker's cache.
    answer = locked.complete(locked.key, range(100, 150))
    assert answer.status_code == 200
    assert answer.json()["usage"]["baton"]["kv_transfer"]["bytes"] > 0, "KV crossed a locked socket"


def test_no_secret_is_seen_anywhere(locked: Locked) -> None:
    locked.complete(locked.key)
    locked.complete("sk-wrong-but-not-shown")
    router = psutil.Process(locked.router.pid)
    processes = [router, *router.children(recursive=True)]
    assert len(processes) == 3
    seen = [locked.log(), str(locked.status())]
    url, headers = f"{locked.http}/metrics", locked.headers
    seen.append(httpx.get(url, headers=headers, trust_env=False, timeout=60).text)
    for process in processes:
        seen += [str(process.cmdline()), str(process.environ())]
    for text in seen:
        assert text
        for secret in [*locked.secrets, "sk-wrong-but-not-shown"]:
            assert secret not in text


def test_a_worker_without_a_key_or_with_another_s_is_not_let_in(locked: Locked) -> None:
    """And one with its own is, on a running cluster."""
    locked.worker("decode", 1, "--keys", str(locked.keys))
    command = [sys.executable, "-m", "worker", "--executor", "hash", "--router", locked.bus]
    for role in ([], ["--keys", str(locked.keys), "--role", "decode", "--rank", "5"]):
        with subprocess.Popen(
            [*command, "--rank", "5", *role],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.STDOUT,
        ) as worker:
            if role:  # its key file is not there
                assert worker.wait(START_S) == 78
                continue
            assert worker.stdout is not None
            for line in worker.stdout:
                if "does it ask for keys" in line:
                    break
            else:
                raise AssertionError("it ended without saying why")
            worker.terminate()
            worker.stdout.read()
    assert locked.find("decode", 5) is None


def frame(body: bytes, *, more: bool = False, command: bool = False) -> bytes:
    """One frame of ZMTP 3, in its long form."""
    return bytes([2 | more | command << 2]) + struct.pack(">Q", len(body)) + body


def flood(cluster: Cluster, mechanism: bytes) -> int:
    """Speak ZMTP to the bus and never end the first message; return by how much its RSS grew."""
    router = psutil.Process(cluster.router.pid)
    before = router.memory_info().rss
    host, port = cluster.bus.removeprefix("tcp://").rsplit(":", 1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    ready = frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER", command=True)
    part = frame(bytes(2 * MIB), more=True)
    with socket.create_connection((host, int(port)), timeout=5.0) as stream:
        try:
            stream.sendall(greeting + ready)
            for _ in range(64):
                stream.sendall(part)
        except OSError:  # it hung up, or reads no more
            assert mechanism != b"NULL" or isinstance(cluster, Locked)
        return int(router.memory_info().rss - before)


def connections_of_strangers(cluster: Locked) -> None:
    """Knock with keys that nobody knows, as often as one machine does in a second."""
    end = time.monotonic() + 1.0
    with zmq.Context() as context:
        while time.monotonic() < end:
            stranger = context.socket(zmq.DEALER)
            for name, value in client_options(
                new_key_pair(), cluster.pair("router").public
            ).items():
                stranger.setsockopt(getattr(zmq, name), value)
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(cluster.bus)
            stranger.poll(20)
            stranger.close()


def test_a_connection_without_a_key_cannot_fill_the_memory(locked: Locked) -> None:
    router = psutil.Process(locked.router.pid)
    before = router.memory_info().rss
    for mechanism in (b"NULL", b"CURVE", b"PLAIN"):
        assert flood(locked, mechanism) < MAX_GROWTH
    connections_of_strangers(locked)
    assert router.memory_info().rss - before < MAX_GROWTH
    assert locked.complete(locked.key).status_code == 200


def test_without_keys_the_same_flood_would(hash_cluster: Cluster) -> None:
    """Without keys memory grows, so the test above can fail."""
    assert flood(hash_cluster, b"NULL") > 2 * MAX_GROWTH


async def test_a_key_lets_a_worker_offer_kv_in_its_own_name_only(locked: Locked) -> None:
    worker = locked.worker("decode", 2, "--keys", str(locked.keys), "--kv-segment-port", "off")
    endpoint = kv_endpoint(worker)

    def peer(party: str, identity: bytes) -> ScriptedPrefill:
        keys = Keys(locked.keys, party)
        return ScriptedPrefill(endpoint, identity, keys=keys, server="decode-2")

    prompt = [1] * 40
    for request_id, party in enumerate(("prefill-0", "decode-1"), start=1):
        async with peer(party, f"{party}-5".encode()) as good:
            good.offer(request_id, prompt)
            assert (await good.ack())[0].request_id == request_id
            good.cancel(request_id)
    for party, identity in (
        ("decode-1", b"prefill-0-6"),
        ("decode-1", b"any-1-6"),
        ("prefill-0", b"prefill-01-6"),
        ("router", b"router-0-6"),
    ):
        async with peer(party, identity) as bad:
            bad.offer(3, prompt)
            await asyncio.wait_for(bad.is_refused.wait(), 60)
            assert bad.is_quiet
    locked.until_idle()
    worker.terminate()
    worker.wait(START_S)


def test_a_revoked_worker_is_out(locked: Locked) -> None:
    if locked.find("decode", 1) is None:
        locked.worker("decode", 1, "--keys", str(locked.keys))
    path = locked.keys / "authorized_keys"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "decode-1" not in line))
    until(lambda: locked.find("decode", 1) is None, "decode-1 gone")
    assert locked.complete(locked.key).status_code == 200


def test_kv_is_sealed_and_is_again_when_a_worker_was_killed(tmp_path: Path) -> None:
    """A first transfer opens the connection for it, and does not wait for that."""
    up = "segments have a connection of their own"
    with Locked(tmp_path, "--worker-args=--kv-shared-memory off --kv-unasked-bytes 0") as cluster:

        def is_sealed(times: int) -> bool:
            assert cluster.complete(cluster.key).status_code == 200
            return cluster.log().count(up) >= times

        until(lambda: is_sealed(1), up)
        cluster.kill_local("decode", 0)  # the router starts another
        until(lambda: is_sealed(2), up, START_S)
        cluster.until_idle()
        log = cluster.log()
        assert not any(secret in log for secret in cluster.secrets)
