"""Measure the whole system as its clients see it, a monolithic engine, and the floors of both.

A router, a prefill and a decode worker share the device.  A monolithic engine, which does prefill
and decode without a router, serves the same prompts.  A floor is what no system can beat: each
step reads every weight and its sequences' KV once at the device's measured read rate, and prompts
run at its measured matrix rate.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
from msgspec.structs import replace

from router.command.bench.load import Measured, Run, Target, Workload, load, summary
from scripts.models.make_model import make_model
from tests.cluster import Cluster
from tests.gpu import bench
from tests.gpu.engine import GREEDY, SHAPES, Shape, loaded
from tests.gpu.settings import Part, Settings
from tests.gpu.system import explained
from tests.gpu.trail import Figures
from worker.embedded.serving import ServingEngine
from worker.executor.contract import MemoryRequirements

ROOT = Path(__file__).resolve().parents[2]


def serve_parts(settings: Settings) -> dict[str, Part]:
    """Measure TTFT, ITL and tokens per second with a model of each shape."""
    return {name: partial(_serve, settings, name) for name in SHAPES}


def _serve(settings: Settings, name: str) -> Figures:
    figures: Figures = {}
    draw = settings.random(f"serve {name}")
    workloads = {
        count: _workload(settings, draw, count) for count in settings.size((1, 32, 128), (1, 2))
    }
    with _cluster(settings, SHAPES[name]) as cluster:
        # Compilation and first allocations must not be measured.
        warm = max(count for count in workloads if count <= 32)
        _run(cluster, _workload(settings, draw, warm), warm)
        for count, workload in workloads.items():
            figures |= _figures(f"serve_{name}_{count}", _run(cluster, workload, count))
        figures |= _transfer(cluster, name, len(workloads[1].prompts[0]), draw)
    with loaded(settings, SHAPES[name]) as (executor, serving):
        serving.start()
        for count, workload in workloads.items():
            run = asyncio.run(_in_one_engine(serving, workload, count))
            figures |= _figures(f"engine_{name}_{count}", run)
        rates = bench.limit_rates(settings)
        for count, workload in workloads.items():
            floors = _floors(executor.capabilities.memory, workload, count, rates)
            figures |= {f"floor_{name}_{count}_{what}": value for what, value in floors.items()}
    return figures


def _workload(settings: Settings, draw: Random, concurrency: int) -> Workload:
    prompt_tokens, output_tokens, rounds = settings.size((2048, 128, 2), (24, 8, 1))
    return Workload.draw(
        seed=draw.getrandbits(30),
        requests=rounds * concurrency,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        vocab_size=512,  # the demo tokenizer has fewer tokens than the model
    )


def _run(cluster: Cluster, workload: Workload, concurrency: int) -> Run:
    run = asyncio.run(load(Target.find(cluster.http), workload, concurrency))
    if run.problems:
        raise RuntimeError(f"{len(run.problems)} of {len(run.done)} responses: {run.problems[0]}")
    return run


async def _in_one_engine(serving: ServingEngine, workload: Workload, concurrency: int) -> Run:
    """Run a workload in a monolithic engine in this process."""
    options = replace(GREEDY, max_tokens=workload.output_tokens)
    waiting, done = iter(workload.prompts), list[Measured]()

    async def one_client() -> None:
        for prompt in waiting:
            measured, start_s = Measured(len(prompt)), time.perf_counter()
            async for _ in serving.stream(prompt, options):
                measured.chunk_s.append(time.perf_counter() - start_s)
            measured.num_tokens = len(measured.chunk_s)
            done.append(measured)

    start_s = time.perf_counter()
    await asyncio.gather(*[one_client() for _ in range(concurrency)])
    return Run(done, [], time.perf_counter() - start_s)


def _figures(name: str, run: Run) -> Figures:
    found = summary([run])
    return {
        f"{name}_tokens_per_s": found["output_tokens_per_s"],
        f"{name}_ttft_p50_ms": found["ttft_ms"]["p50"],
        f"{name}_itl_p50_ms": found["itl_ms"]["p50"],
        f"{name}_itl_p99_ms": found["itl_ms"]["p99"],
    }


def _floors(
    memory: MemoryRequirements, workload: Workload, concurrency: int, rates: dict[str, float]
) -> dict[str, float]:
    """Return the shortest possible TTFT and ITL, and the most tokens per second."""
    prompt_tokens, output_tokens = len(workload.prompts[0]), workload.output_tokens
    # Weights have 16 bits, and each token multiplies and adds each weight once.
    prompt_s = memory.parameter_bytes * prompt_tokens / (rates["matmul_tflops"] * 1e12)
    kv_bytes = concurrency * (prompt_tokens + output_tokens / 2) * memory.kv_bytes_per_token
    step_s = (memory.parameter_bytes + kv_bytes) / (rates["read_gbs"] * 1e9)
    tokens_per_s = concurrency * output_tokens / (concurrency * prompt_s + output_tokens * step_s)
    return {"ttft_ms": prompt_s * 1e3, "itl_ms": step_s * 1e3, "tokens_per_s": tokens_per_s}


@contextmanager
def _cluster(settings: Settings, shape: Shape) -> Iterator[Cluster]:
    """Start a router, a prefill and a decode worker."""
    is_small = settings.is_small
    config: dict[str, Any] = {"vocab_size": 1024} if is_small else shape._asdict()
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(
            Path(directory, "model"),
            seed=settings.seed,
            tokenizer=ROOT / "wire" / "demo",
            **config,
        )
        worker_args = "--threads 1" if is_small else "--max-ubatch-tokens 4096"
        args = ("--device", settings.device.type, "--worker-args", worker_args)
        with Cluster(Path(directory), model=str(model), args=args) as cluster, explained(cluster):
            yield cluster
            cluster.until_idle()


def _transfer(cluster: Cluster, name: str, prompt_tokens: int, draw: Random) -> Figures:
    """Measure KV transfer alone, by prompts sent one after another."""
    num_bytes, seconds = 0, 0.0
    with httpx.Client(base_url=cluster.http, timeout=120, trust_env=False) as client:
        for _ in range(4):
            prompt = [draw.randrange(512) for _ in range(prompt_tokens)]
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            body["baton_usage"] = True
            response = client.post("/v1/completions", json=body | {"ignore_eos": True})
            response.raise_for_status()
            moved = response.json()["usage"]["baton"]["kv_transfer"]
            num_bytes += moved["bytes"]
            seconds += moved["transfer_seconds"]
    if not num_bytes:
        raise RuntimeError("no KV was handed over")
    return {
        f"transfer_{name}_gbs": num_bytes / seconds / 1e9,
        f"transfer_{name}_bytes": num_bytes / 4,
    }
