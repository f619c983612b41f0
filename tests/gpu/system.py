"""The whole system is right: router, prefill and decode workers as processes, on the device."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx

from tests.cluster import Cluster, until
from tests.gpu.settings import Part, Settings
from tests.gpu.trail import Figures
from tests.gpu.verify import Wrong
from wire.options import Options
from wire.process.model import locate
from worker.embedded.serving import ServingEngine
from worker.executor.torch import TorchExecutor

MAX_KILLS = 5
# Lines of a cluster's log that are shown when something fails.
SHOWN_LINES = 4


def system_parts(settings: Settings) -> dict[str, Part]:
    """Compare texts with the CPU's, also across a kill."""
    return {"texts": partial(_texts, settings)}


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
            for num_kills in range(1 + MAX_KILLS):
                until(lambda: cluster.find("decode", 0), "a worker that was killed is back")
                got = asyncio.run(_answers(cluster, prompts, num_tokens, is_killed=num_kills > 0))
                what = " where a worker was killed" if num_kills else ""
                if wrong := sum(it != want for it, want in zip(got, wanted, strict=True)):
                    raise Wrong(f"{wrong} of {count} texts are not the CPU's{what}")
                if _num_failovers(cluster):
                    return {"texts": (1 + num_kills) * count}
    raise Wrong(f"a decode worker was killed {MAX_KILLS} times, and none of its texts went on")


def _num_failovers(cluster: Cluster) -> int:
    """Return how many texts went on elsewhere: a kill may come when all that it hits have ended."""
    with httpx.Client(base_url=cluster.http, timeout=60, trust_env=False) as client:
        return client.get("/metrics").text.count("baton_failovers_total{")


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
    """Stream all texts at a time; kill a decode worker, if asked to, when most have begun."""
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
                    if 2 * sum(len(it) > 1 for it in texts) > len(texts):
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
