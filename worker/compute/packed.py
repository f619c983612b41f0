"""Packed weights of projections and feed-forwards (dense, experts), for the compiled CPU loops.

Methods return operations, which run later as part of a program and write to the given buffers.
"Planes" are rows quantized to a high and a low int8 part, the input format of int8 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from kernels import Activation
from kernels.cpu.experts import Routes
from kernels.cpu.linear import PackedWeight
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.linear_int8 import Int8Weight
from kernels.cpu.program import Operation, Program
from kernels.cpu.row_groups import Groups
from kernels.cpu.rows_int8 import to_planes
from kernels.cpu.rowwise import gate, norm
from kernels.cpu.simd import PANEL
from worker.compute.ranks import Ranks
from worker.model.families import Experts
from worker.model.weights import ExpertMLP, GatedMLP, Linear

Weight = PackedWeight | PairedWeight | Int8Weight
# Python code that runs between two programs, such as communication between shards.
Call = Callable[[], object]
Packed = type[PackedWeight] | type[PairedWeight] | type[Int8Weight]


class Projection(NamedTuple):
    """A packed matrix, or a stack of them, with its bias and the norm of its output, if any."""

    weight: Weight
    bias: torch.Tensor | None
    norm: torch.Tensor | None

    @classmethod
    def packed(
        cls,
        matrix: Linear,
        packed: Packed,
        *,
        is_gated: bool = False,
        norm: torch.Tensor | None = None,
    ) -> Projection:
        """Pack a matrix; `is_gated` if it stacks gate and up, as `gated` requires."""
        weight: Weight
        if is_gated and not issubclass(packed, PackedWeight):
            weight = packed(matrix.weight, is_gated=True)
        else:
            weight = packed(matrix.weight)
        if matrix.bias is None:
            return cls(weight, None, norm)
        missing = weight.num_columns - matrix.bias.shape[-1]
        return cls(weight, pad(matrix.bias.float(), (0, missing)), norm)

    def of(self, x: torch.Tensor, y: torch.Tensor, groups: Groups | None = None) -> Operation:
        """Return the operation y = x W^T + b."""
        return self.weight.times(x, y, bias=self.bias, groups=groups)

    def added(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        planes: torch.Tensor,
        added: torch.Tensor,
        eps: float,
        ranks: Ranks | None = None,
    ) -> list[Operation | Call]:
        """Return the operations y += x W^T + b or, with a norm, y += norm(x W^T + b).

        `planes` is a buffer for x quantized to int8, and `added` one for the input of the norm.
        With `ranks`, whose shards have other columns of x, the products are all-reduced.
        """
        program, x = self._as_input(x, planes)
        if self.norm is None:
            times = self.weight.times(x, y, bias=self.bias, is_added=adds_residual(ranks))
            return [*program, times, *all_reduce_calls(y, ranks)]
        times = self.weight.times(x, added, bias=self.bias)
        norm_added = norm(added, self.norm, eps, y, is_added=True)
        return [*program, times, *all_reduce_calls(added, ranks), norm_added]

    def added_by_token(
        self, x: torch.Tensor, y: torch.Tensor, planes: torch.Tensor, groups: Groups
    ) -> list[Operation | Call]:
        """Return the operations y[token] += share * (x W^T + b), for each row of x.

        `groups` has the expert (matrix W, bias b), token and share of each row; a token has a row
        for each of its experts.  See `added` for `planes`.
        """
        program, x = self._as_input(x, planes)
        times = self.weight.times(x, y, bias=self.bias, groups=groups, is_by_token=True)
        return [*program, times]

    def _as_input(
        self, x: torch.Tensor, planes: torch.Tensor
    ) -> tuple[list[Operation | Call], torch.Tensor]:
        """Return x in the format that the weight needs, and the operations that convert it."""
        if isinstance(self.weight, Int8Weight):
            return [to_planes(x, planes)], planes
        return [], x

    def gated(
        self,
        x: torch.Tensor,
        wide: torch.Tensor,
        y: torch.Tensor,
        activation: Activation,
        groups: Groups | None = None,
    ) -> list[Operation]:
        """Return the operations y = activation(gate) * up; `wide` is a buffer for gate and up."""
        if isinstance(self.weight, PackedWeight):
            return [self.of(x, wide, groups), gate(wide, y, activation)]
        return [self.weight.times_gated(x, y, bias=self.bias, activation=activation, groups=groups)]


class PackedMLP(NamedTuple):
    """The packed matrices of a dense feed-forward."""

    gate_up: Projection
    down: Projection

    @classmethod
    def of(cls, mlp: GatedMLP, packed: Packed, post_norm: torch.Tensor | None) -> PackedMLP:
        return cls(
            gate_up=Projection.packed(mlp.gate_up, packed, is_gated=True),
            down=Projection.packed(mlp.down, packed, norm=post_norm),
        )


class PackedExperts(NamedTuple):
    """The packed matrices of a mixture of experts.

    The router is always float32, because rounding its scores could choose another expert.
    """

    config: Experts
    router: Projection
    gate_up: Projection
    down: Projection

    @classmethod
    def of(cls, mlp: ExpertMLP, packed: Packed) -> PackedExperts:
        return cls(
            config=mlp.config,
            router=Projection.packed(mlp.router, PackedWeight),
            gate_up=Projection.packed(mlp.gate_up, packed, is_gated=True),
            down=Projection.packed(mlp.down, packed),
        )

    def added(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        exact_norm: Operation | None,
        buffers: ExpertBuffers,
        activation: Activation,
        ranks: Ranks | None = None,
    ) -> list[Operation | Call]:
        """Return the operations that add the experts' outputs for `normed` rows to `hidden`.

        `exact_norm` writes the same rows in float32 to `buffers.exact`; None if they are float32.
        """
        config, num_tokens = self.config, len(hidden)
        num_rows = num_tokens * config.top_k
        logits, spread = buffers.logits[:num_tokens], buffers.spread[:num_rows]
        wide, gated = buffers.wide[:num_rows], buffers.gated[:num_rows]
        planes = buffers.planes[:num_rows]
        routes = Routes(num_tokens, config.num_experts, config.top_k)
        exact = normed if exact_norm is None else buffers.exact[:num_tokens]
        return [
            *([] if exact_norm is None else [exact_norm]),
            self.router.of(exact, logits),
            *routes.choose(logits, is_normalized=config.is_normalized),
            routes.spread(normed, spread),
            *self.gate_up.gated(spread, wide, gated, activation, routes.groups),
            *([] if adds_residual(ranks) else [hidden.zero_]),
            *self.down.added_by_token(gated, hidden, planes, routes.groups),
            *all_reduce_calls(hidden, ranks),
        ]


class ExpertBuffers:
    """Intermediate results of a mixture of experts, for up to `num_tokens` tokens.

    Attributes:
        exact: The router's input in float32, if matrix products read another dtype.
        logits: The router's output.
        spread: The inputs of the experts, with top_k rows per token like the buffers below.
        wide, gated, planes: The outputs of gate and up, their product, and that in int8.
    """

    def __init__(self, experts: Experts, hidden_size: int, num_tokens: int, packed: Packed) -> None:
        rows, inner = num_tokens * experts.top_k, experts.intermediate_size
        is_float = packed is PackedWeight
        self.exact = torch.empty(num_tokens, 0 if is_float else hidden_size)
        self.logits = torch.empty(num_tokens, -(-experts.num_experts // PANEL) * PANEL)
        self.spread = packed.inputs(rows, hidden_size)
        self.wide = torch.empty(rows, 2 * inner if is_float else 0)
        self.gated = gated_rows(rows, inner, packed)
        self.planes = packed.inputs(rows, inner) if packed is Int8Weight else torch.empty(rows, 0)


def in_one_call(parts: Iterable[Operation | Call]) -> Call:
    """Return one callable that runs all parts; consecutive operations form one program."""
    calls: list[Call] = []
    operations: list[Operation] = []
    for part in parts:
        if isinstance(part, Operation):
            operations.append(part)
        else:
            calls += [Program(operations).run, part]
            operations = []
    if not calls:
        return Program(operations).run
    calls.append(Program(operations).run)

    def run() -> None:
        for call in calls:
            call()

    return run


def adds_residual(ranks: Ranks | None) -> bool:
    """Return whether this shard adds the residual before the all-reduce; exactly one does."""
    return ranks is None or ranks.shard.rank == 0


def all_reduce_calls(summand: torch.Tensor, ranks: Ranks | None) -> list[Call]:
    """Return the call that all-reduces `summand` in place; an empty list for a single shard."""
    return [] if ranks is None or ranks.shard.size == 1 else [partial(ranks.all_reduce, summand)]


def gated_rows(num_rows: int, size: int, packed: Packed) -> torch.Tensor:
    """Allocate a buffer for the output of `Projection.gated`."""
    return torch.empty(num_rows, size) if packed is Int8Weight else packed.inputs(num_rows, size)


def bytes_of(part: Any) -> int:
    """Return the total size in bytes of the tensors and packed weights in (nested) tuples."""
    if isinstance(part, tuple):
        return sum(map(bytes_of, part))
    return int(getattr(part, "nbytes", 0))
