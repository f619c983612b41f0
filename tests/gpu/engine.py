"""The engine's steps beside their floors, and beside the GPU's own time in the same run.

A floor is a rate: a decode step has to read the weights and its sequences' KV once, so what it
reaches is those bytes over its time, to be compared with the device's measured read rate.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from scripts.models.make_model import make_model
from tests.gpu.settings import Part, Settings
from tests.gpu.timing import device_s
from tests.gpu.trail import Figures
from wire.options import Options
from worker.compute.graphs import SIZES
from worker.embedded.serving import ServingEngine
from worker.executor.gpu import create
from worker.executor.torch import TorchExecutor

GREEDY = Options(temperature=0.0, ignore_eos=True)
DRAWN = Options(temperature=0.8, top_k=50, top_p=0.95, seed=7, ignore_eos=True)
# Drawing may cost so much more than the likeliest token, at 32 streams.
DRAWING_S = 0.15e-3


class Shape(NamedTuple):
    """A model to measure: the shape of a name in `make_model`, with so many layers."""

    like: str
    num_hidden_layers: int


SHAPES = {"1b": Shape("llama-3.2-1b", 16), "7b": Shape("mistral-7b", 8)}


def engine_parts(settings: Settings) -> dict[str, Part]:
    """Decode steps by number of streams, of drawn tokens too, and a prompt, of each shape."""
    return {name: partial(_measure, settings, name) for name in SHAPES}


def _measure(settings: Settings, name: str) -> Figures:
    figures: Figures = {}
    with loaded(settings, SHAPES[name]) as (executor, serving):
        memory, vocab_size = executor.capabilities.memory, executor.info.vocab_size
        length, count = settings.size((512, 48), (8, 6))
        draw = settings.random(f"engine {name}")

        def prompts(number: int, length: int) -> list[list[int]]:
            return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(number)]

        for number in (1, 8, 32, 128):
            step_s = _step_s(serving, prompts(number, length), count, GREEDY)
            alone_s = _graph_s(executor, number, step_s)
            needed = memory.parameter_bytes + number * (length + count) * memory.kv_bytes_per_token
            figures |= {
                f"step_{name}_{number}_ms": step_s * 1e3,
                f"graph_{name}_{number}_ms": alone_s * 1e3,
                f"graph_{name}_{number}_gbs": needed / alone_s / 1e9,
            }
            if number == 32:
                drawn_s = _step_s(serving, prompts(number, length), count, DRAWN)
                figures[f"drawn_{name}_ms"] = drawn_s * 1e3
                figures[f"drawn_{name}_allowed_ms"] = (step_s + DRAWING_S) * 1e3
        read = partial(_prompt_s, serving)
        whole_s = median(read(prompt) for prompt in prompts(5, settings.size(2048, 48)))
        busy_s = _busy_s(partial(read, *prompts(1, settings.size(2048, 48))), whole_s)
        figures |= {f"prompt_{name}_ms": whole_s * 1e3, f"prompt_{name}_busy_ms": busy_s * 1e3}
    return figures


@contextmanager
def loaded(settings: Settings, shape: Shape) -> Iterator[tuple[TorchExecutor, ServingEngine]]:
    """Make a random model of a shape; yield its executor and an engine that is warm."""
    config: dict[str, Any] = {"vocab_size": 512} if settings.is_small else shape._asdict()
    num_blocks, step_tokens = settings.size((6144, 8192), (256, 64))
    with tempfile.TemporaryDirectory() as directory:
        path = make_model(Path(directory, "model"), seed=settings.seed, **config)
        executor = create(
            model_path=path, model_name=shape.like, fingerprint="", device=settings.device.type
        )
        serving = ServingEngine(
            executor,
            num_blocks=num_blocks,
            max_ubatch_tokens=step_tokens,
            prefix_cache=False,
        )
        try:
            yield executor, serving
        finally:
            serving.close()


def _step_s(
    serving: ServingEngine, prompts: list[list[int]], count: int, options: Options
) -> float:
    """Return the median time of a step in which each prompt's answer gets a token."""
    durations = _durations(serving, prompts, count, options)
    return median(durations[-count // 2 : -2])


def _prompt_s(serving: ServingEngine, prompt: list[int]) -> float:
    """Return the time from a prompt to its first token."""
    return sum(_durations(serving, [prompt], 1, GREEDY))


def _durations(
    serving: ServingEngine, prompts: list[list[int]], count: int, options: Options
) -> list[float]:
    """Generate `count` tokens after each prompt; return the seconds of each step."""
    ids = [serving.submit(prompt, replace(options, max_tokens=count)) for prompt in prompts]
    durations = []
    while not all(map(serving.is_complete, ids)):
        start_s = time.perf_counter()
        serving.run_iteration()
        durations.append(time.perf_counter() - start_s)
    return durations


def _graph_s(executor: TorchExecutor, number: int, step_s: float) -> float:
    """Return the time of the recorded step alone, on what it was given last.

    Without a GPU nothing is recorded: that of the whole step.
    """
    if (graphs := vars(executor).get("_graphs")) is None:
        return step_s
    size = next(size for size in SIZES if size >= number)
    return device_s(graphs._recorded[size].replay)  # noqa: SLF001


def _busy_s(call: Callable[[], object], whole_s: float) -> float:
    """Return how long the GPU computes for a call; without one, what the call takes."""
    if not torch.cuda.is_available():
        return whole_s
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return float(sum(it.self_device_time_total for it in profiled.key_averages())) / 1e6
