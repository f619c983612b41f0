"""Where the time of a request went, on whole clusters: both roles, one worker, and a failover."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from struct import pack
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
SMALL = ("--worker-args", "--num-blocks 48 --block-size 16 --max-ubatch-tokens 64")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("timelines")
    with Cluster(directory, executor="hash", args=SMALL) as cluster:
        yield cluster


def complete(cluster: Cluster, num_tokens: int, *, name: str = "", **fields: Any) -> dict[str, Any]:
    """Serve a prompt of this many tokens; return its report."""
    body = {"model": "demo", "ignore_eos": True, "max_tokens": 20, **fields}
    body |= {"prompt": [1 + (num_tokens + i) % 200 for i in range(num_tokens)]}
    headers = {"x-request-id": name or f"r-{num_tokens}", "traceparent": PARENT}
    with httpx.Client(base_url=cluster.http, timeout=60, trust_env=False) as http:
        answer = http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return http.get(f"/v1/requests/{headers['x-request-id']}").json()  # type: ignore[no-any-return]


def lines_of(cluster: Cluster, name: Any) -> list[dict[str, Any]]:
    return [line for line in cluster.events("request") if line["request_id"] == name]


def within(span: dict[str, Any], outer: dict[str, Any]) -> bool:
    end = span["at_s"] + span["duration_s"]
    is_in: bool = outer["at_s"] <= span["at_s"] <= end <= outer["at_s"] + outer["duration_s"] + 1e-5
    return is_in


def test_both_workers_tell_their_parts(cluster: Cluster) -> None:
    [choice] = complete(cluster, 200)["choices"]
    [attempt] = choice["attempts"]
    found = attempt["timeline"]
    assert (attempt["prefill"], attempt["decode"]) == ("prefill-0", "decode-0")
    assert found["outcome"] == "length" and found["failed"] is None
    prefill, transfer, decode = found["prefill"], found["transfer"], found["decode"]
    assert prefill["num_chunks"] == len(prefill["chunks"]) >= 4, "64 tokens a step"
    assert sum(it["tokens"] for it in prefill["chunks"]) == 200
    assert transfer["num_segments"] == len(transfer["segments"]) >= 1
    assert sum(it["bytes"] for it in transfer["segments"]) == transfer["bytes"]
    assert transfer["bytes"] == choice["kv_bytes"] > 0
    assert decode["num_steps"] == 19
    assert 0 < decode["step_p50_s"] <= decode["step_p99_s"] <= decode["step_max_s"]
    for span in (prefill, transfer, decode):
        assert within(span, found)
    for span in prefill["chunks"]:
        assert within(span, prefill)
    assert prefill["at_s"] + prefill["duration_s"] <= found["first_token_s"] <= choice["total_s"]
    assert choice["trace_id"] == TRACE


def test_one_token_has_no_decoding(cluster: Cluster) -> None:
    [choice] = complete(cluster, 50, max_tokens=1)["choices"]
    [attempt] = choice["attempts"]
    found = attempt["timeline"]
    assert found["prefill"]["num_chunks"] == 1 and found["decode"] is None


def test_the_log_of_the_router_has_the_trace(cluster: Cluster) -> None:
    complete(cluster, 40, name="logged")
    [line] = until(lambda: lines_of(cluster, "logged"), "its line")
    assert (line["trace_id"], line["traceparent"]) == (TRACE, PARENT)


def ask(cluster: Cluster, options: bytes) -> tuple[int, bytes]:
    """Send a raw TCP client's request; return the last tag, and all that came."""
    prompt = pack("<4I", 5, 6, 7, 8) + options
    with socket.create_connection(cluster.tcp, timeout=30) as client:
        stream = client.makefile("rwb")
        stream.write(pack("<IIQII", 30, 16 + len(prompt), 1, 4, 0xFFFFFFFF) + prompt)
        stream.write(pack("<IIQII", 34, 16, 1, 2, 0))
        stream.flush()
        received, tag = b"", 0
        while tag not in (36, 45):
            head = stream.read(8)
            tag = int.from_bytes(head[:4], "little")
            received += stream.read(int.from_bytes(head[4:], "little"))
    return tag, received


def test_a_raw_tcp_client_gets_no_timeline_and_may_give_a_trace(cluster: Cluster) -> None:
    given = b"\xabtraceparent\xd9\x37" + PARENT.encode()
    tag, received = ask(cluster, b"\x82" + given + b"\xa8timeline\xc3")
    assert tag == 36 and b"timeline" not in received
    [line] = until(lambda: lines_of(cluster, 1), "its line")
    assert (line["face"], line["trace_id"]) == ("tcp", TRACE)
    # A worker that refuses a request logs the trace too.
    bad = b"\xa9structure\x82\xa4kind\xa4lark\xa4text\xa1("
    assert ask(cluster, b"\x82" + given + bad)[0] == 45
    [line] = until(lambda: cluster.events("request failed"), "the worker's line")
    assert (line["logger"], line["trace_id"]) == ("worker", TRACE)


def test_a_failed_attempt_says_who_failed_and_the_worker_logs_the_trace(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.http, timeout=60, trust_env=False) as http:
        body = {"model": "demo", "prompt": [7] * 64, "max_tokens": 400, "ignore_eos": True}
        headers = {"x-request-id": "moved", "traceparent": PARENT}
        body["stream"] = True
        with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            next(lines)
            [pid] = cluster.local_pids("decode", 0)
            os.kill(pid, signal.SIGKILL)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        [choice] = http.get("/v1/requests/moved").json()["choices"]
    first, *_, last = choice["attempts"]
    assert first["timeline"]["outcome"] == "worker_lost"
    # The router notices it, or the prefill worker, whose transfer to it has just ended, says so.
    assert first["timeline"]["failed"] in ("decode-0", "prefill-0")
    assert first["timeline"]["prefill"] and not first["timeline"]["decode"]
    assert last["timeline"]["outcome"] == "length" and last["timeline"]["decode"]
    assert last["timeline"]["queue_s"] >= 0
    failed: list[dict[str, Any]] = []  # usually one attempt; two if decode-0 was chosen again

    def are_all_logged() -> bool:
        failed[:] = cluster.events("attempt failed, another follows")
        return len(failed) == len(choice["attempts"]) - 1

    until(are_all_logged, "a line for each attempt")
    assert {(line["trace_id"], line["request_id"]) for line in failed} == {(TRACE, "moved")}
