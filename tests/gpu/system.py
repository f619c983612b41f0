"""The whole system: router, prefill and decode workers as processes, on the device."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import torch

from scripts.bench_serve import Workload, load, summary
from scripts.models.make_model import make_model
from tests.cluster import Cluster
from tests.gpu.settings import Part, Settings
from tests.gpu.trail import Figures
from tests.gpu.verify import Wrong
from wire.options import Options
from wire.process.model import locate
from worker.embedded.serving import ServingEngine
from worker.executor.torch import TorchExecutor

ROOT = Path(__file__).resolve().parents[2]
# Lines of a cluster's log that are shown when something fails.
SHOWN_LINES = 4


def system_parts(settings: Settings) -> dict[str, Part]:
    """Compare texts with the CPU's, also across a kill; then measure a model of 1B's shape."""
    return {"texts": partial(_texts, settings), "serve": partial(_serve, settings)}


def _texts(settings: Settings) -> Figures:
    """Greedy texts in float32 are the CPU's, and remain so where a decode worker is killed."""
    draw = settings.random("texts")
    count, num_tokens = settings.size((12, 300), (8, 200))
    prompts = [[draw.randrange(1, 1300) for _ in range(20)] for _ in range(count)]
    wanted = cpu_texts(prompts, num_tokens)
    threads = "" if settings.backend == "cuda" else " --threads 1"
    worker_args = f"--dtype float32 --kv-cache-bytes {settings.size(1_000_000_000, 50_000_000)}"
    args = ("--device", settings.device.type, "--worker-args", worker_args + threads)
    with tempfile.TemporaryDirectory() as directory:
        with Cluster(Path(directory), local="1,2", args=args) as cluster, explained(cluster):
            for is_killed in (False, True):
                got = asyncio.run(_answers(cluster, prompts, num_tokens, is_killed=is_killed))
                what = " where a worker was killed" if is_killed else ""
                if wrong := sum(it != want for it, want in zip(got, wanted, strict=True)):
                    raise Wrong(f"{wrong} of {count} texts are not the CPU's{what}")
            with httpx.Client(base_url=cluster.http, timeout=60, trust_env=False) as client:
                if "baton_failovers_total{" not in client.get("/metrics").text:
                    raise Wrong("a decode worker with texts in it was killed, and none went on")
    return {"texts": 2 * count}


def cpu_texts(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return what the demo model goes on with on this machine's CPU, in float32."""
    executor = TorchExecutor.load(locate("demo"), name="demo", device="cpu", dtype="float32")
    options = Options(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
    serving = ServingEngine(executor)
    try:
        ids = [serving.submit(prompt, options) for prompt in prompts]
        while not all(map(serving.is_complete, ids)):
            serving.run_iteration()
        results = [serving.get_result(number) for number in ids]
        return [list(it.token_ids) for it in results if it is not None]
    finally:
        serving.close()


async def _answers(
    cluster: Cluster, prompts: list[list[int]], num_tokens: int, *, is_killed: bool
) -> list[list[int]]:
    """Stream all texts at a time; kill a decode worker, if asked to, when each has begun."""
    texts: list[list[int]] = [[] for _ in prompts]
    have_begun = asyncio.Event()

    async def answer(client: httpx.AsyncClient, prompt: list[int], text: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": num_tokens, "return_token_ids": True}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise RuntimeError(chunk["error"]["message"])
                    for choice in chunk["choices"]:
                        text += choice.get("token_ids") or ()
                    if all(len(it) > 1 for it in texts):
                        have_begun.set()

    limits = httpx.Limits(max_connections=len(prompts))
    url = cluster.http
    async with httpx.AsyncClient(
        base_url=url, timeout=120, limits=limits, trust_env=False
    ) as client:
        async with asyncio.TaskGroup() as group:
            for prompt, text in zip(prompts, texts, strict=True):
                group.create_task(answer(client, prompt, text))
            if is_killed:
                await have_begun.wait()
                cluster.kill_local("decode", 0)
    return texts


def _serve(settings: Settings) -> Figures:
    prompt_tokens, output_tokens, concurrency = settings.size((2048, 128, 32), (48, 8, 2))
    with _cluster(settings) as (cluster, vocab_size):
        draw = settings.random("system")
        workload = partial(
            Workload.draw,
            requests=2 * concurrency,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            vocab_size=vocab_size,
        )
        # What is compiled and recorded once is no part of what is measured.
        for seed in (draw.getrandbits(30), draw.getrandbits(30)):
            run = asyncio.run(load(cluster.http, workload(seed=seed), concurrency))
            if run.problems:
                problem = f"{len(run.problems)} of {len(run.done)} answers: {run.problems[0]}"
                raise RuntimeError(problem)
        figures = _transfer(cluster, vocab_size, prompt_tokens, draw)
        cluster.until_idle()
    found = summary([run])
    return figures | {
        "serve_tokens_per_s": found["output_tokens_per_s"],
        "serve_prompt_tokens_per_s": found["prompt_tokens_per_s"],
        "serve_ttft_p50_ms": found["ttft_ms"]["p50"],
        "serve_itl_p50_ms": found["itl_ms"]["p50"],
        "serve_concurrency": concurrency,
    }


@contextmanager
def _cluster(settings: Settings) -> Iterator[tuple[Cluster, int]]:
    """Start a router, a prefill and a decode worker; yield them and the model's vocabulary."""
    is_small = settings.is_small
    with tempfile.TemporaryDirectory() as directory:
        make: Callable[..., Path] = partial(make_model, Path(directory, "model"))
        model = make(
            **({"vocab_size": 1024} if is_small else {"like": "llama-3.2-1b"}),
            seed=settings.seed,
            tokenizer=ROOT / "wire" / "demo",
        )
        worker_args = "--threads 1" if is_small else f"{_kv_flag()} --max-ubatch-tokens 4096"
        args = ("--device", settings.device.type, "--worker-args", worker_args)
        # The demo tokenizer has fewer ids than the model: what is sent is ids below both.
        with Cluster(Path(directory), model=str(model), args=args) as cluster, explained(cluster):
            yield cluster, 1000


@contextmanager
def explained(cluster: Cluster) -> Iterator[None]:
    """Add the last that router and workers have logged to whatever the body raises."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{error}; {last_lines(cluster.log())}") from error


def last_lines(log: str) -> str:
    """Return the last errors of a cluster's log, or its last lines if there are none."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if '"level": "error"' in line or not line.startswith("{")]
    shown = []
    for line in (errors or lines)[-SHOWN_LINES:]:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            shown.append(line)
            continue
        for name in ("level", "timestamp", "logger"):
            entry.pop(name, None)
        exception = str(entry.pop("exception", "")).strip().splitlines()[-1:]
        said = [f"{name}={value}" for name, value in entry.items() if name != "event"]
        shown.append(" ".join([entry.get("event", ""), *said, *exception]))
    return "the log ended: " + " | ".join(line[:200] for line in shown)


def _kv_flag() -> str:
    """Leave room on the device for two workers with their weights, and for what runs beside."""
    free_bytes, _ = torch.cuda.mem_get_info()
    return f"--kv-cache-bytes {min(16 << 30, free_bytes // 4)}"


def _transfer(cluster: Cluster, vocab_size: int, prompt_tokens: int, draw: Random) -> Figures:
    """Send prompts one after another; each one's KV crosses alone."""
    num_bytes, seconds = 0, 0.0
    with httpx.Client(base_url=cluster.http, timeout=120, trust_env=False) as client:
        for _ in range(4):
            prompt = [draw.randrange(vocab_size) for _ in range(prompt_tokens)]
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            body["baton_usage"] = True
            response = client.post("/v1/completions", json=body | {"ignore_eos": True})
            response.raise_for_status()
            moved = response.json()["usage"]["baton"]["kv_transfer"]
            num_bytes += moved["bytes"]
            seconds += moved["transfer_seconds"]
    if not num_bytes:
        raise RuntimeError("no KV was handed over")
    return {"transfer_gbs": num_bytes / seconds / 1e9, "transfer_bytes": num_bytes / 4}
