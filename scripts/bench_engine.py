"""Measure the speed of one engine, compared with transformers and with the hardware's limits.

    python scripts/bench_engine.py                       # a random model of SmolLM2-135M's shape
    python scripts/bench_engine.py --model DIR --dtype float32 --json result.json
    python scripts/bench_engine.py --weights int8        # int8 weights for Baton only
    python scripts/bench_engine.py --peer http://127.0.0.1:8001   # also measure an OpenAI server
    python scripts/bench_engine.py --temperature 1 --top-p 0.95   # random sampling, not greedy

All systems are measured alternately in several rounds of one run, and the best round of each
counts: on a shared machine, a ratio means more than a single figure.  First Baton's greedy tokens
are checked against the float32 logits of transformers; a wrong token ends the run without figures.

Lower bounds are measured too.  A decode step reads every weight once, for any number of streams, so
one bound is the size of the weights divided by the measured read bandwidth.  It also multiplies
every weight with every stream, as prefill does with every token: one bound is the sum of the
matrix products measured one by one (by torch, or by oneDNN with packed weights, whichever is
faster), another one all products of a step in sequence by oneDNN in bfloat16.  The time of a step
is the median of a round, a bound is the best of several measurements; for the bandwidth, the median
of the best round is printed too.

OpenMP's threads sleep between operations, as in a worker.  Set OMP_WAIT_POLICY=ACTIVE to let them
spin, which is torch's default and may be faster for transformers.

--against sets the dtypes for transformers.  On a CPU without bfloat16 instructions, bfloat16 and
float32 differ a lot.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as a worker does, before torch is imported
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.command.bench.load import LoadClient, Measured, Target
from router.command.bench.table import Table
from scripts.models.make_model import make_model
from wire.options import Options
from worker.engine.engine import Engine
from worker.engine.outputs import Token
from worker.engine.sequence import Sequence as Text
from worker.executor.batch import Batch
from worker.executor.torch import TorchExecutor

CONTEXT = 32  # the number of prompt tokens of each stream
BLOCK_SIZE = 16
Prompts = list[list[int]]


class Drawing(TypedDict):
    """The sampling settings of every system."""

    temperature: float
    top_p: float


GREEDY: Drawing = {"temperature": 0.0, "top_p": 1.0}


class Timed:
    """An executor that adds up its own time; the rest of a step is the overhead of the engine."""

    def __init__(self, executor: TorchExecutor) -> None:
        self.info, self.capabilities = executor.info, executor.capabilities
        self.allocate, self.score = executor.allocate, executor.score
        self.seconds = 0.0
        self._executor = executor

    def forward(self, batch: Batch) -> torch.Tensor:
        with self._clock():
            return self._executor.forward(batch)

    def sample(self, logits: torch.Tensor, batch: Batch) -> Any:
        with self._clock():
            return self._executor.sample(logits, batch)

    def shutdown(self) -> None:
        self._executor.shutdown()

    @contextmanager
    def _clock(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


class Ours:
    """Baton: the engine with its torch executor."""

    def __init__(
        self, path: Path, dtype: str, weights: str, prompt_tokens: int, drawing: Drawing
    ) -> None:
        self.weights = weights
        self.name = "baton" if weights == "auto" else f"baton {weights}"
        executor = TorchExecutor.load(
            path, name="bench", device="cpu", dtype=dtype, weights=weights
        )
        self.executor = Timed(executor)
        blocks = 32 * (CONTEXT + 256) // BLOCK_SIZE + prompt_tokens // BLOCK_SIZE + 64
        self.engine = Engine(
            self.executor,
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            max_ubatch_tokens=2048,
            prefix_cache=False,
        )
        self.overhead_ms: dict[int, float] = {}
        self._ids = 0
        self._options = Options(ignore_eos=True, seed=1, **drawing)

    def generate(
        self, prompts: Prompts, count: int, options: Options | None = None
    ) -> tuple[float, list[float], Prompts]:
        """Return the seconds for prefill and for each decode step, and the generated tokens."""
        options = options or self._options
        first = self._ids
        for prompt in prompts:
            self.engine.add(Text(self._ids, prompt, options, max_new_tokens=count))
            self._ids += 1
        steps: list[float] = []
        outside: list[float] = []
        tokens: Prompts = [[] for _ in prompts]
        while self.engine.has_work():
            self.executor.seconds = 0.0
            start = time.perf_counter()
            outputs = self.engine.step()
            steps.append(time.perf_counter() - start)
            outside.append(steps[-1] - self.executor.seconds)
            for output in outputs:
                if isinstance(output, Token):
                    tokens[output.request_id - first].append(output.token_id)
        num_prompt_steps = len(steps) - (count - 1)
        if count > 1:
            self.overhead_ms[len(prompts)] = 1000 * statistics.median(outside[num_prompt_steps:])
        return sum(steps[:num_prompt_steps]), steps[num_prompt_steps:], tokens

    def prompt_s(self, prompts: Prompts) -> float:
        return self.generate(prompts, 1)[0]

    def step_s(self, prompts: Prompts, count: int) -> float:
        return statistics.median(self.generate(prompts, count)[1])


class Theirs:
    """transformers: its `generate` function."""

    def __init__(self, path: Path, dtype: str, drawing: Drawing) -> None:
        from transformers import AutoModelForCausalLM

        self.name = f"transformers {dtype}"
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self.model.generation_config.eos_token_id = None
        is_drawn = drawing["temperature"] > 0
        self._drawing: dict[str, Any] = {"do_sample": is_drawn}
        if is_drawn:
            self._drawing |= {**drawing, "top_k": 0}

    def _times(self, prompts: Prompts, count: int) -> list[float]:
        """Return the seconds from the start to each token."""
        times: list[float] = []
        start = time.perf_counter()

        def stop(ids: torch.Tensor, _scores: torch.Tensor, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter() - start)
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                pad_token_id=0,
                stopping_criteria=[stop],
                **self._drawing,
            )
        return times

    def prompt_s(self, prompts: Prompts) -> float:
        return self._times(prompts, 1)[0]

    def step_s(self, prompts: Prompts, count: int) -> float:
        times = self._times(prompts, min(count, 8))
        return statistics.median([b - a for a, b in pairwise(times)])


class Peer:
    """A running OpenAI server."""

    def __init__(self, url: str, drawing: Drawing) -> None:
        self.name, self._drawing = url, drawing
        self._target = Target.find(url)

    def prompt_s(self, prompts: Prompts) -> float:
        return self._measured(prompts, 1)[0].ttft_s

    def step_s(self, prompts: Prompts, count: int) -> float:
        every = [each.chunk_s for each in self._measured(prompts, count)]
        return statistics.median([(times[-1] - times[0]) / (count - 1) for times in every])

    def _measured(self, prompts: Prompts, count: int) -> list[Measured]:
        async def all_of_them() -> list[Measured]:
            clients = [LoadClient(self._target) for _ in prompts]
            pairs = zip(clients, prompts, strict=True)
            return await asyncio.gather(
                *[client.measure(prompt, count, **self._drawing) for client, prompt in pairs]
            )

        measured = asyncio.run(all_of_them())
        if problems := [each.problem for each in measured if each.problem]:
            raise SystemExit(f"{self.name}: {problems[0]}")
        return measured


def check(ours: Ours, path: Path, vocab_size: int) -> float:
    """Check Baton's greedy tokens against the float32 logits of transformers.

    Return the largest gap between the best logit and the logit of a generated token, in standard
    deviations.  For int8 weights, the weights of transformers are rounded too.

    Raises:
        SystemExit: The gap is too large to be caused by 16-bit KV or by rounding.
    """
    prompts = draw(3, CONTEXT - 7, vocab_size)
    tokens = ours.generate(prompts, 12, Options(temperature=0, ignore_eos=True))[2]
    reference = Theirs(path, "float32", GREEDY).model
    if ours.weights == "int8":
        round_matrices(reference)
    worst = 0.0
    for prompt, generated in zip(prompts, tokens, strict=True):
        ids = torch.tensor([prompt + generated[:-1]])
        with torch.inference_mode():
            logits = reference(ids).logits[0, len(prompt) - 1 :]
        chosen = logits[torch.arange(len(generated)), generated]
        worst = max(worst, float(((logits.amax(-1) - chosen) / logits.std()).max()))
    is_exact = ours.executor.info.layout.kv_groups[0].dtype == "float32" and ours.weights == "auto"
    limit = 1e-3 if is_exact else 0.25
    if worst > limit:
        raise SystemExit(f"wrong tokens: {worst:.4f} deviations below the best, limit {limit}")
    return worst


@torch.no_grad()
def round_matrices(model: Any) -> None:
    """Round weight matrices as `--weights int8` does, which matters for a random model."""
    products = {id(module.weight) for module in model.modules() if hasattr(module, "in_features")}
    for weight in model.parameters():
        if id(weight) in products:
            scale = weight.abs().amax(1, keepdim=True) / 127
            weight.copy_((weight / scale).round() * scale)


def draw(num_prompts: int, length: int, vocab_size: int) -> Prompts:
    random_ids = random.Random(num_prompts * length)
    return [[random_ids.randrange(vocab_size) for _ in range(length)] for _ in range(num_prompts)]


def seconds_of(measure: Callable[[], Any], count: int) -> list[float]:
    """Call `measure` `count` times and return how long each call took, in seconds."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        measure()
        seconds.append(time.perf_counter() - start)
    return seconds


def read_bandwidth() -> tuple[float, float]:
    """Return the best and the median memory read bandwidth of all cores, in bytes per second."""
    from kernels.cpu.linear import PackedWeight
    from kernels.cpu.program import Program

    memory = torch.ones(1 << 26)
    weight = PackedWeight(torch.ones(1 << 17, 1024, dtype=torch.bfloat16))
    program = Program([weight.times(torch.ones(1, 1024), torch.empty(1, 1 << 17))])
    sums, products = seconds_of(memory.sum, 10), seconds_of(program.run, 10)
    # Use whichever reads faster, because this is a bound.
    at_best, middle = (
        max(memory.nbytes / of(sums), weight.panels.nbytes / of(products))
        for of in (min, statistics.median)
    )
    return at_best, middle


def product_s(rows: int, columns: int, depth: int, dtype: torch.dtype) -> float:
    """Return how long torch takes for one matrix product of these sizes, in seconds."""
    x, weight = torch.ones(rows, depth, dtype=dtype), torch.ones(columns, depth, dtype=dtype)
    with torch.inference_mode():
        return best_s(lambda: torch.nn.functional.linear(x, weight))


def packed_step_s(shapes: Sequence[tuple[int, int, int]]) -> float:
    """Return how long oneDNN takes for these bfloat16 products in sequence with packed weights.

    Return infinity if the processor has no bfloat16 instructions.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
        return math.inf
    onednn = torch.ops.mkldnn  # torch has no public API for packed weights
    inputs = {
        (rows, depth): torch.ones(rows, depth, dtype=torch.bfloat16) for rows, _, depth in shapes
    }
    products = []
    for rows, columns, depth in shapes:
        weight = torch.ones(columns, depth, dtype=torch.bfloat16)
        packed = onednn._reorder_linear_weight(weight, rows)  # noqa: SLF001
        products.append((inputs[rows, depth], packed))

    def step() -> None:
        for x, packed in products:
            onednn._linear_pointwise(x, packed, None, "none", [], "")  # noqa: SLF001

    with torch.inference_mode():
        return best_s(step)


def best_s(measure: Callable[[], Any]) -> float:
    """Return the minimum time of five calls after a warm-up call, in seconds."""
    return min(seconds_of(measure, 6)[1:])


def floors(
    path: Path, dtype: str, kept: str, streams: Sequence[int], prompt_tokens: int
) -> dict[str, float]:
    """Measure the lower bounds for decode steps and for prefill; see the module.

    Each product of a step is measured alone: the fastest of torch in `dtype`, torch in float32 and
    oneDNN in bfloat16.  The products by oneDNN are also measured in sequence, each with separate
    weights as in a real step.  `kept` is the format of the weights in memory, "int8" or "auto".
    """
    config = json.loads((path / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, inner, layers = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    head_dim = config.get("head_dim") or hidden // heads
    shapes = [((heads + 2 * kv_heads) * head_dim, hidden), (hidden, heads * head_dim)]
    shapes += [(2 * inner, hidden), (hidden, inner)]
    vocab_size = config["vocab_size"]
    kinds = {getattr(torch, dtype), torch.float32}

    def step_s(product: Callable[[int, int, int], float], rows: int, rows_of_head: int) -> float:
        of_layer = sum(product(rows, *shape) for shape in shapes)
        return float(layers * of_layer + product(rows_of_head, vocab_size, hidden))

    def quickest_s(rows: int, columns: int, depth: int) -> float:
        by_torch = min(product_s(rows, columns, depth, kind) for kind in kinds)
        return min(by_torch, packed_step_s([(rows, columns, depth)]))

    def packed_s(rows: int, rows_of_head: int) -> float:
        of_layers = [(rows, *shape) for _ in range(layers) for shape in shapes]
        return packed_step_s([*of_layers, (rows_of_head, vocab_size, hidden)])

    steps = {f"decode_{count}": (count, count) for count in streams} | {
        "prompt": (prompt_tokens, 1)
    }
    stored = 1 if kept == "int8" else 4 if config["dtype"] == "float32" else 2
    weights = layers * sum(rows * columns for rows, columns in shapes) + vocab_size * hidden
    bandwidth, middle = read_bandwidth()
    return {
        "bandwidth_GB_s": bandwidth / 1e9,
        "decode_s": weights * stored / bandwidth,
        "decode_middle_s": weights * stored / middle,
        **{f"{name}_products_s": step_s(quickest_s, *rows) for name, rows in steps.items()},
        **{f"{name}_packed_s": packed_s(*rows) for name, rows in steps.items()},
    }


def run(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Check the tokens, then measure all systems alternately; return the best seconds of each."""
    vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
    drawing: Drawing = {"temperature": args.temperature, "top_p": args.top_p}
    ours = Ours(path, args.dtype, args.weights, args.prompt, drawing)
    gap = check(ours, path, vocab_size)
    gc.collect()
    print(f"tokens checked: at most {gap:.4f} deviations below the best of transformers float32")
    systems: list[Any] = [ours, *[Theirs(path, dtype, drawing) for dtype in args.against]]
    systems += [Peer(args.peer, drawing)] if args.peer else []
    measured = partial(floors, path, args.dtype, args.weights, args.streams, args.prompt)
    floor = measured()
    result: dict[str, Any] = {"floor": floor, "gap": gap, "systems": {}}
    for _ in range(args.rounds):
        for system in systems:
            figures = result["systems"].setdefault(system.name, {})
            for streams in args.streams:
                seconds = system.step_s(draw(streams, CONTEXT, vocab_size), args.tokens)
                key = f"decode_{streams}"
                figures[key] = min(figures.get(key, seconds), seconds)
                print(
                    f"{system.name}: {streams} streams, {1000 * seconds:.1f} ms a step", flush=True
                )
            seconds = system.prompt_s(draw(1, args.prompt, vocab_size))
            figures["prompt"] = min(figures.get("prompt", seconds), seconds)
        # Measure the bounds again in each round, so that noise affects all systems alike.
        again = measured()
        for key in floor:
            best = max if key == "bandwidth_GB_s" else min
            floor[key] = best(floor[key], again[key])
    result["engine_overhead_ms"] = ours.overhead_ms
    return result


def show(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Print all times in milliseconds, and as multiples of Baton's."""
    rows: list[tuple[str, dict[str, float]]] = list(result["systems"].items())
    ours = rows[0][1]
    floor = result["floor"]
    for name, key in (("weights read once", "decode_s"), ("in the middle", "decode_middle_s")):
        rows.append((name, {f"decode_{streams}": floor[key] for streams in args.streams}))
    for name, key in (("every product alone", "products_s"), ("all packed by oneDNN", "packed_s")):
        rows.append((name, {step: floor[f"{step}_{key}"] for step in ours}))
    table = Table("ms (x ours):>28", *[f"{name}:>19" for name in ours])
    for name, figures in rows:
        cells = {k: f"{1000 * figures[k]:9.1f} ({figures[k] / ours[k]:6.2f})" for k in figures}
        table.row(name, *[cells.get(k, "") for k in ours])
    overhead = ", ".join(f"{n}: {ms:.3f}" for n, ms in result["engine_overhead_ms"].items())
    print(f"engine's own time a step in ms, by streams: {overhead}")
    print(f"measured: {floor['bandwidth_GB_s']:.1f} GB/s, {torch.get_num_threads()} threads")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a model directory; default: a random 135M")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV")
    parser.add_argument("--weights", default="auto", help="auto, or int8 for ours")
    parser.add_argument("--against", nargs="*", help="dtypes of transformers; default: --dtype")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the long prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0, help="default: greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--peer", metavar="URL", help="an OpenAI server to measure as well")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args(argv)
    args.against = [args.dtype] if args.against is None else args.against
    return args


def main() -> None:
    """Run the benchmark with the settings of the command line."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = args.model or make_model(Path(scratch), like="smollm2-135m")
        result = run(args, path)
    show(result, args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
