"""Measure mixture-of-experts layers on this CPU, compared with a dense layer of the same work.

    python scripts/bench_experts.py                    # 1 to 2048 tokens; 8 of 64 experts each
    python scripts/bench_experts.py --hidden 2048 --inner 1024 --kinds bfloat16
    python scripts/bench_experts.py --experts 128 --tokens 256

The experts of a layer, routing included, are timed alternately with one dense feed-forward that is
as wide as all experts of a token together.  Both need the same number of multiplications per token,
but the dense layer has far fewer weights.  The output of the experts is first compared with the
reference.  With few tokens per expert, reading the weights is the bottleneck: `ceiling` is the best
possible `ratio`, if only the weights of the used experts were read, at torch's read bandwidth.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

# Must be set before torch is imported: idle threads sleep instead of spinning, as in a worker.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch.nn.functional import rms_norm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels import SILU
from kernels.cpu.linear import PackedWeight
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.linear_int8 import Int8Weight
from kernels.cpu.program import Program
from kernels.cpu.rowwise import norm
from router.command.bench.table import Table
from worker.compute.packed import (
    Call,
    ExpertBuffers,
    Packed,
    PackedExperts,
    PackedMLP,
    gated_rows,
    in_one_call,
)
from worker.model.families import Experts
from worker.model.weights import ExpertMLP, GatedMLP, Linear, widen

EPS = 1e-6
KINDS: dict[str, Packed] = {"float32": PackedWeight, "bfloat16": PairedWeight, "int8": Int8Weight}
# The maximum relative error against the reference.
LIMITS = {"float32": 1e-4, "bfloat16": 0.03, "int8": 0.05}


class Layer(NamedTuple):
    """Experts, and a dense feed-forward with as many multiplications per token."""

    hidden: int
    experts: ExpertMLP
    dense: GatedMLP


def random_layer(config: Experts, hidden: int) -> Layer:
    """Create a layer with random bfloat16 weights."""

    def matrix(parts: list[int], columns: int, count: int | None = None) -> Linear:
        named = {str(index): rows for index, rows in enumerate(parts)}
        made = Linear(
            named,
            columns,
            bias=False,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            num_experts=count,
        )
        made.weight.normal_(std=columns**-0.5)
        return made

    inner, count = config.intermediate_size, config.num_experts
    wide = inner * config.top_k
    return Layer(
        hidden,
        ExpertMLP(
            config=config,
            router=matrix([count], hidden),
            gate_up=matrix([inner, inner], hidden, count),
            down=matrix([hidden], inner, count),
            activation=SILU,
            shared=None,
        ),
        GatedMLP(matrix([wide, wide], hidden), matrix([hidden], wide), SILU),
    )


def experts_program(
    layer: Layer, packed: Packed, experts: PackedExperts, x: torch.Tensor
) -> tuple[Call, torch.Tensor]:
    """Return a call that runs the experts on the rows `x`, and its output tensor."""
    rows, ones = packed.inputs(*x.shape), torch.ones(layer.hidden)
    out = x.clone()
    room = ExpertBuffers(experts.config, layer.hidden, len(x), packed)
    exact = None if packed is PackedWeight else norm(x, ones, EPS, room.exact)
    Program([norm(x, ones, EPS, rows)]).run()
    return in_one_call(experts.added(out, rows, exact, room, SILU)), out


def dense_program(packed: Packed, mlp: PackedMLP, x: torch.Tensor) -> Call:
    """Return a call that runs the dense feed-forward on the rows `x`."""
    inner = mlp.down.weight.shape[1]
    rows, wide = packed.inputs(*x.shape), torch.empty(len(x), 2 * inner)
    gated, planes = gated_rows(len(x), inner, packed), packed.inputs(len(x), inner)
    Program([norm(x, torch.ones(x.shape[1]), EPS, rows)]).run()
    return in_one_call(
        [
            *mlp.gate_up.gated(rows, wide, gated, SILU),
            *mlp.down.added(gated, x.clone(), planes, torch.empty(0), EPS),
        ]
    )


def best(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Run the functions alternately and return the minimum time of each, in seconds."""
    least = [float("inf")] * len(runs)
    for _ in range(rounds):
        for index, run in enumerate(runs):
            start = time.perf_counter()
            run()
            least[index] = min(least[index], time.perf_counter() - start)
    return least


def measure(table: Table, layer: Layer, kind: str, all_tokens: list[int], rounds: int) -> None:
    """Check and time one weight format, and print a row for each number of tokens."""
    packed, config = KINDS[kind], layer.experts.config
    experts, mlp = (
        PackedExperts.of(layer.experts, packed),
        PackedMLP.of(layer.dense, packed, post_norm=None),
    )
    panels = [experts.gate_up.weight.panels, experts.down.weight.panels]
    wide = deepcopy(layer.experts)
    widen(wide)
    flat = panels[0].view(-1).view(torch.int64)
    for tokens in all_tokens:
        x = torch.randn(tokens, layer.hidden)
        program, out = experts_program(layer, packed, experts, x)
        program()
        normed = rms_norm(x, (layer.hidden,), eps=EPS)
        want = wide(normed)
        error = float((out - x - want).norm() / want.norm())
        if not error < LIMITS[kind]:
            raise SystemExit(f"{kind}, {tokens} tokens: off by {error:.3f}, no figures")
        dense = dense_program(packed, mlp, x)
        least = best(rounds, program, dense, lambda: flat.sum())
        chosen = wide.router(normed).topk(config.top_k).indices
        touched = len(set(chosen.flatten().tolist()))
        num_bytes = sum(it.nbytes for it in panels) * touched / config.num_experts
        floor = num_bytes / (flat.nbytes / least[2])
        products = tokens * config.top_k * 3 * layer.hidden * config.intermediate_size
        rates = (products / seconds / 1e9 for seconds in least[:2])
        times = 1e3 * least[0], 1e3 * least[1]
        ratio, ceiling = least[1] / least[0], min(1, least[1] / floor)
        table.row(kind, tokens, *times, *rates, ratio, touched, 1e3 * floor, ceiling)


def main() -> None:
    """Run the benchmark with the settings of the command line."""
    parser = argparse.ArgumentParser(description="Experts beside one feed-forward.")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 128, 256, 512, 1024, 2048])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    config = Experts(args.experts, args.top_k, args.inner, is_normalized=True)
    layer = random_layer(config, args.hidden)
    table = Table(
        *("weights:<8", "tokens:>6", "experts ms:>10.2f", "one ms:>8.2f"),
        *("G products/s:>12.0f", "one:>6.0f", "ratio:>6.2f"),
        *("experts read:>12", "read ms:>8.2f", "ceiling:>7.2f"),
    )
    for kind in args.kinds:
        measure(table, layer, kind, args.tokens, args.rounds)


if __name__ == "__main__":
    main()
