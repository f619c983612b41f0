"""The whole system: router, prefill and decode as processes, on a random model of 1B's shape."""

from __future__ import annotations

import asyncio
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

ROOT = Path(__file__).resolve().parents[2]


def system_parts(settings: Settings) -> dict[str, Part]:
    """Start it once, hand prompts over one by one, then serve many at a time."""
    return {"serve": partial(_serve, settings)}


def _serve(settings: Settings) -> Figures:
    prompt_tokens, output_tokens, concurrency = (48, 8, 2) if settings.is_small else (2048, 128, 32)
    with _cluster(settings) as (cluster, vocab_size):
        draw = settings.random("system")
        figures = _transfer(cluster, vocab_size, prompt_tokens, draw)
        workload = Workload.draw(
            seed=draw.getrandbits(30),
            requests=2 * concurrency,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            vocab_size=vocab_size,
        )
        run = asyncio.run(load(cluster.http, workload, concurrency))
        if run.problems:
            raise RuntimeError(f"{len(run.problems)} of {len(run.done)} answers: {run.problems[0]}")
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
        with Cluster(Path(directory), model=str(model), args=args) as cluster:
            yield cluster, 1000


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
