"""Steps in flight: the texts of an engine that does not wait for them, and how long they take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.models.make_model import make_model
from tests.gpu.settings import Part, Settings
from tests.gpu.trail import Figures
from tests.gpu.verify import Wrong
from tests.worker.gpu_on_cpu import executor_of, gpu_on_cpu
from wire.options import Options
from worker.engine.engine import Engine
from worker.engine.outputs import Token
from worker.engine.sequence import Sequence
from worker.executor.gpu import create

STREAMS = (1, 8, 32, 128)
GREEDY = Options(ignore_eos=True)


def text_parts(settings: Settings) -> dict[str, Part]:
    """The same requests with steps in flight and without."""
    return {"steps in flight": partial(_texts, settings)}


def step_parts(settings: Settings) -> dict[str, Part]:
    """What a step takes beside its graph alone."""
    return {f"step of {count}": partial(_step, settings, count) for count in STREAMS}


@contextmanager
def _executor(settings: Settings, **config: Any) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as scratch:
        path = make_model(Path(scratch), **config)
        if settings.backend == "cuda":
            yield create(model_path=path, model_name="flights", fingerprint="", device="cuda")
        else:
            with gpu_on_cpu():
                yield executor_of(path)


def _engine(executor: Any, num_blocks: int) -> Engine:
    settings: dict[str, Any] = {"max_ubatch_tokens": 8192, "prefix_cache": False}
    return Engine(executor, num_blocks=num_blocks, block_size=16, **settings)


def _texts(settings: Settings) -> Figures:
    draw = settings.random("flights")
    requests = [
        ([draw.randrange(10, 200) for _ in range(draw.randint(1, 20))], draw.randint(1, 25))
        for _ in range(settings.size(40, 5))
    ]
    told: list[list[tuple[int, int]]] = []
    for waits in (True, False):
        with _executor(settings, seed=1) as executor:
            engine = _engine(executor, 200)
            if waits:
                vars(engine)["_drawer"] = None
            tokens: list[tuple[int, int]] = []
            for request_id, (prompt, limit) in enumerate(requests):
                stops = tuple(range(0, 256, 8)) if request_id % 2 else ()
                options = Options(ignore_eos=True, stop_token_ids=stops)
                engine.add(Sequence(request_id, prompt, options, limit))
                tokens += [it for _ in range(3) for it in _stepped(engine)]
            while engine.has_work():
                tokens += _stepped(engine)
        told.append(sorted(tokens, key=lambda it: it[0]))
    if told[0] != told[1]:
        raise Wrong("an engine that does not wait for steps tells other texts")
    return {"tokens": len(told[0])}


def _stepped(engine: Engine) -> list[tuple[int, int]]:
    return [(it.request_id, it.token_id) for it in engine.step() if isinstance(it, Token)]


def _step(settings: Settings, count: int) -> Figures:
    """Half of a 1B Llama, with a small vocabulary; each stream has a short prompt."""
    config: dict[str, Any] = settings.size(
        {"like": "llama-3.2-1b", "num_hidden_layers": 8, "vocab_size": 32_000}, {}
    )
    num_steps = settings.size(100, 2)
    with _executor(settings, **config) as executor:
        engine = _engine(executor, count * 16)
        for request_id in range(count):
            engine.add(Sequence(request_id, [*range(7, 39)], GREEDY, num_steps + 40))
        while len(engine.slots().generating) < count:
            engine.step()
        for _ in range(settings.size(10, 1)):
            engine.step()
        step_s = _each_s(settings, engine.step, num_steps)
        recorded = vars(vars(executor)["_graphs"])["_recorded"]
        size = min(it for it in recorded if it >= count)
        graph_s = _each_s(settings, recorded[size].replay, num_steps)
    return {f"step_{count}_ms": step_s * 1e3, f"graph_{count}_ms": graph_s * 1e3}


def _each_s(settings: Settings, call: Any, count: int) -> float:
    """Return the time of one of many calls, of which each begins behind the one before."""
    wait: Any = torch.cuda.synchronize if settings.backend == "cuda" else (lambda: None)
    wait()
    start_s = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return (time.perf_counter() - start_s) / count
