"""A load on real and on faulty servers: no wrong response passes, and the figures are right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from router.command.bench import load as bench_load
from router.command.bench.load import Measured, Run, Target, Workload, load, percentiles, summary
from router.command.client import RequestError, read_api_key
from tests.cluster import Cluster
from tests.router.command.bench.openai_server import serving, stream
from wire.process.model import DEMO, vocab_size

WHOLE = (([5, 6], None), ([7], "length"))


def workload(requests: int = 1, *, long_every_s: float = 0.0) -> Workload:
    return Workload.draw(
        seed=1,
        requests=requests,
        prompt_tokens=9,
        output_tokens=3,
        vocab_size=1000,
        shared_prefix_tokens=4,
        long_prompt_tokens=20,
        long_every_s=long_every_s,
    )


def test_prompts_share_only_their_prefix_and_are_others_with_another_seed() -> None:
    prompts = workload(50).prompts
    assert {len(prompt) for prompt in prompts} == {9}
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt[4:]) for prompt in prompts}) == 50
    assert workload(50).prompts == prompts
    lengths = {"prompt_tokens": 9, "output_tokens": 3, "vocab_size": 4}
    other = Workload.draw(seed=2, requests=50, **lengths).prompts
    assert {token_id for prompt in other for token_id in prompt} == {0, 1, 2, 3}


async def test_a_cluster_is_loaded_and_every_response_checked(
    cluster: Cluster, key_file: Path
) -> None:
    target = await asyncio.to_thread(Target.find, cluster.http, read_api_key(key_file))
    assert (target.model, target.vocab_size) == ("demo", vocab_size(DEMO))
    assert target.api_key not in repr(target)
    run = await load(target, workload(5, long_every_s=0.1), 2)
    assert run.problems == [] and len(run.done) == 5 and len(run.long) >= 1
    for measured in run.done:
        assert (measured.prompt_tokens, measured.num_tokens, len(measured.token_ids)) == (9, 3, 3)
        assert len(measured.itl_s) == 2
    assert summary([run])["long_ttft_ms"]["p50"] > 0
    without_key = await load(Target(cluster.http, "demo"), workload(), 1)
    assert without_key.problems[0].startswith("HTTP 401: ")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (stream(*WHOLE), ""),
        (stream((None, None), (None, "length"), usage=3), ""),
        (stream(([5], None), ([7], "length")), "2 of 3 tokens, finish_reason length"),
        (stream((None, "length"), usage=2), "2 of 3 tokens"),
        (stream(([5, 6, 7], None)), "finish_reason none"),
        (stream(([5, 6, 7], "stop")), "finish_reason stop"),
        (stream(*WHOLE, ([], "length")), "finish_reason length, length"),
        (b'data: {"error": {"message": "no worker is left"}}\n\n', "no worker is left"),
        (b"data: {half\n\n", "JSONDecodeError"),
        (b'data: {"choices": [7]}\n\n', "AttributeError"),
    ],
)
async def test_a_wrong_response_is_found(body: bytes, problem: str) -> None:
    with serving(lambda number: body) as url:
        run = await load(Target(url, "one"), workload(3), 2)
    if problem:
        assert len(run.problems) == 3 and problem in run.problems[0]
    else:
        assert run.problems == [] and {it.num_tokens for it in run.done} == {3}


@pytest.mark.parametrize(
    ("kind", "body", "problem"),
    [
        ("application/json", b'{"error": {"message": "too long"}}', "HTTP 503: too long"),
        ("text/html", b"<html>", "HTTP 503: b'<html>'"),
    ],
)
async def test_an_error_is_told_as_the_server_does(kind: str, body: bytes, problem: str) -> None:
    with serving(lambda number: body, status=503, kind=kind) as url:
        run = await load(Target(url, "one"), workload(), 1)
    assert run.problems == [problem]


async def test_nobody_listening_is_a_wrong_response_too() -> None:
    run = await load(Target("http://127.0.0.1:1", "one"), workload(), 1)
    assert "ConnectionRefusedError" in run.problems[0]


async def test_a_server_that_never_answers_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_load, "TIMEOUT_S", 0.01)

    async def read_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(read_only, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        run = await load(Target(f"http://127.0.0.1:{port}", "one"), workload(), 1)
    assert run.problems == ["TimeoutError: the server sent nothing for 0.01 s"]


def test_a_model_is_found_by_name() -> None:
    with serving(lambda number: b"") as url:
        assert Target.find(url) == Target(url, "one")
        assert Target.find(url, model="two").model == "two"
        with pytest.raises(RequestError, match=r"no model 'x': --model is one of \['one', 'two'\]"):
            Target.find(url, model="x")
    with serving(lambda number: b"", models=["one"]) as url:
        with pytest.raises(RequestError, match="lists no models"):
            Target.find(url)


def test_figures_are_in_milliseconds_and_of_all_runs() -> None:
    assert percentiles([0.001 * number for number in range(100, 0, -1)]) == {
        "mean": 50.5,
        "p50": 51.0,
        "p90": 91.0,
        "p99": 100.0,
        "max": 100.0,
    }
    runs = [
        Run([Measured(10, [0.1, 0.3], 2), Measured(10, [0.2, 0.3], 2)], seconds=0.5),
        Run([Measured(10, [0.3, 0.9], 2)], seconds=1.5),
    ]
    figures = summary(runs)
    assert (figures["requests"], figures["output_tokens_per_s"]) == (3, 3.0)
    assert (figures["prompt_tokens_per_s"], figures["requests_per_s"]) == (15.0, 1.5)
    assert (figures["ttft_ms"]["p50"], figures["itl_ms"]["p50"]) == (200.0, 200.0)
    assert figures["e2e_ms"]["max"] == 900.0
