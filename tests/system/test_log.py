"""The log of a real cluster: one line a request, whichever face, and a reader that stalls."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.tcp_client import connect
from tests.cluster import ROOT, START_S, Cluster, until
from tests.poisoned_model import POISON
from wire.errors import ErrorCode
from wire.frames import ANY_RANK, DecodeDone, DecodeRequest, Error, PrefillRequest
from wire.options import Options
from wire.payloads import encode_prompt

SAME = ("outcome", "attempts", "prompt_tokens", "completion_tokens", "cached_tokens", "kv_bytes")
HTTP_ID, TCP_ID = "one-line", 505  # others ask this cluster too, and their lines may be late
TIMES = ("queue_s", "ttft_s", "decode_s", "kv_s", "total_s")


async def ask_over_tcp(cluster: Cluster, decode_rank: int) -> None:
    client = await connect(*cluster.tcp)
    payload = encode_prompt([7, 8, 9], Options(ignore_eos=True))
    client.send(PrefillRequest(TCP_ID, 3, decode_rank), payload)
    client.send(DecodeRequest(TCP_ID, 7))
    async for message in client:
        if isinstance(message.frame, DecodeDone | Error):
            break
    await client.close()


async def test_a_request_is_one_line_on_either_face(hash_cluster: Cluster) -> None:
    url = hash_cluster.http + "/v1/completions"
    body = {"prompt": [4, 5, 6], "max_tokens": 8, "ignore_eos": True}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        await client.post(url, json=body, headers={"x-request-id": HTTP_ID})
    await ask_over_tcp(hash_cluster, ANY_RANK)
    await ask_over_tcp(hash_cluster, 3)  # the router chooses, not the client

    def lines() -> list[dict[str, Any]]:
        ended = hash_cluster.events("request")
        return [line for line in ended if line["request_id"] in (HTTP_ID, TCP_ID)]

    until(lambda: len(lines()) >= 3, "three lines")
    over_http, over_tcp, refused = lines()
    assert [over_http["face"], over_tcp["face"], refused["face"]] == ["http", "tcp", "tcp"]
    assert {name: over_http[name] for name in SAME} == {name: over_tcp[name] for name in SAME}
    assert (over_http["outcome"], over_http["attempts"]) == ("length", 1)
    assert (over_http["prompt_tokens"], over_http["completion_tokens"]) == (3, 8)
    for line in (over_http, over_tcp):
        assert all(0 <= line[name] <= line["total_s"] for name in TIMES)
    assert refused["outcome"] == ErrorCode.INVALID_REQUEST.label


def test_a_reader_that_stalls_stops_nothing(tmp_path: Path) -> None:
    """Nobody reads stderr: its pipe is full after 64 KiB, and the router answers all the same."""
    ready = tmp_path / "ready.json"
    endpoints = ("--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--bus", "tcp://127.0.0.1:0")
    command = [sys.executable, "-m", "router", *endpoints, "--ready-file", str(ready)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as router:
        assert router.stderr is not None
        try:
            until(ready.exists, "listening", START_S)
            url = json.loads(ready.read_text())["http"]
            with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
                for _ in range(600):  # each a line of some 200 bytes
                    assert client.get("/nothing").status_code == 404
                assert client.get("/livez").status_code == 200
            router.terminate()
            assert router.wait(60) == 0
            assert router.stderr.read().count(b"\n") < 600, "the pipe was never full"
        finally:
            router.kill()


# Python imports this at its start: bugs in a router that is otherwise the real one.
PLANTED = f"""
import asyncio, functools, sys, threading
sys.path.insert(0, {str(ROOT)!r})
if "router" in sys.orig_argv:
    from router.api import text
    read = text.read
    def fail(secret, *_):
        raise ValueError(secret)
    async def fail_later(secret):
        fail(secret)
    def completion(model, raw, asker):
        secret = raw.decode()
        if "SECRET" in secret:
            loop = asyncio.get_running_loop()
            loop.call_soon(functools.partial(fail, secret))
            loop.create_task(fail_later(secret))
            threading.Thread(target=fail, args=(secret,)).start()
            {{}}[secret]
        return read(model, raw, asker)
    text.read = completion
"""


class OnTerminal(Cluster):
    """A cluster whose log is read from a terminal: lines for people."""

    def _spawn(self, *args: str) -> subprocess.Popen[bytes]:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", *args], cwd=ROOT, stderr=theirs, env=os.environ | self.environ
        )
        os.close(theirs)
        threading.Thread(target=self._copy, args=(ours,), daemon=True).start()
        self._processes.append(process)
        return process

    def _copy(self, terminal: int) -> None:
        with self.log_path.open("ab") as log:
            try:
                while chunk := os.read(terminal, 1 << 16):
                    log.write(chunk)
                    log.flush()
            except OSError:  # the last of its writers is gone
                os.close(terminal)


@pytest.mark.parametrize("make", [Cluster, OnTerminal], ids=["json", "terminal"])
def test_bugs_leave_nothing_of_a_prompt_in_the_log(tmp_path: Path, make: type[Cluster]) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    cluster = make(tmp_path, executor="tests.poisoned_model:create", args=("--log-level", "debug"))
    cluster.environ = {"PYTHONPATH": str(tmp_path)}
    with cluster, httpx.Client(base_url=cluster.http, trust_env=False, timeout=60) as client:
        # The worker's model fails on the last token, with it in its text and all in its locals.
        for prompt in ("my SECRET", [101, 102, 103, POISON]):
            answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4})
            assert answer.status_code == 500
            assert "SECRET" not in answer.text
        until(lambda: cluster.log().count("ValueError") >= 3, "bugs in the log")
        until(lambda: "ZeroDivisionError" in cluster.log(), "the bug of the model in the log")
    log = cluster.log()
    assert "KeyError" in log and "ValueError" in log
    for secret in ("SECRET", "101, 102", f"last_token_id={POISON}"):
        assert secret not in log
