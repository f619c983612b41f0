"""Feed-forwards packed for compiled loops, one for all tokens or made of experts."""

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
# What a shard does between two operations, with others.
Call = Callable[[], object]
Packed = type[PackedWeight] | type[PairedWeight] | type[Int8Weight]


class Projection(NamedTuple):
    """A matrix, or a stack of them, with what is added to its products."""

    weight: Weight
    bias: torch.Tensor | None
    norm: torch.Tensor | None  # of what is added

    @classmethod
    def packed(
        cls,
        matrix: Linear,
        packed: Packed,
        *,
        is_gated: bool = False,
        norm: torch.Tensor | None = None,
    ) -> Projection:
        """Pack a matrix; one `is_gated` holds gate and up."""
        weight: Weight
        if is_gated and not issubclass(packed, PackedWeight):
            weight = packed(matrix.weight, is_gated=True)
        else:
            weight = packed(matrix.weight)
        if matrix.bias is None:
            return cls(weight, None, norm)
        missing = weight.num_columns - matrix.bias.shape[-1]
        return cls(weight, pad(matrix.bias.float(), (0, missing)), norm)

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return sum(map(bytes_of, self))

    def of(self, x: torch.Tensor, y: torch.Tensor, groups: Groups | None = None) -> Operation:
        """Make y = x W^T + b."""
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
        """Make y += x W^T + b, normalized if there is a norm for it.

        `planes` is room for x as int8 weights take it, `added` for what is normalized; `ranks` have
        other columns of x.
        """
        program, x = self._taken(x, planes)
        if self.norm is None:
            times = self.weight.times(x, y, bias=self.bias, is_added=keeps_sum(ranks))
            return [*program, times, *added_up(y, ranks)]
        times = self.weight.times(x, added, bias=self.bias)
        norm_added = norm(added, self.norm, eps, y, is_added=True)
        return [*program, times, *added_up(added, ranks), norm_added]

    def added_by_token(
        self, x: torch.Tensor, y: torch.Tensor, planes: torch.Tensor, groups: Groups
    ) -> list[Operation | Call]:
        """Add its share of each row of x W^T + b to the row of y of its token; see `added`."""
        program, x = self._taken(x, planes)
        times = self.weight.times(x, y, bias=self.bias, groups=groups, is_by_token=True)
        return [*program, times]

    def _taken(
        self, x: torch.Tensor, planes: torch.Tensor
    ) -> tuple[list[Operation | Call], torch.Tensor]:
        """Return x as the product takes it, after the operations that make it so."""
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
        """Make y = activation(gate) * up; `wide` is room for both."""
        if isinstance(self.weight, PackedWeight):
            return [self.of(x, wide, groups), gate(wide, y, activation)]
        times = self.weight.times_gated(x, y, bias=self.bias, activation=activation, groups=groups)
        return [times]


class PackedMLP(NamedTuple):
    """A feed-forward for all tokens."""

    gate_up: Projection
    down: Projection

    @classmethod
    def of(cls, mlp: GatedMLP, packed: Packed, post_norm: torch.Tensor | None) -> PackedMLP:
        """Pack it; `post_norm` is of what it adds."""
        return cls(
            gate_up=Projection.packed(mlp.gate_up, packed, is_gated=True),
            down=Projection.packed(mlp.down, packed, norm=post_norm),
        )

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self.gate_up.nbytes + self.down.nbytes


class PackedExperts(NamedTuple):
    """A feed-forward made of experts.

    Their router is float32 in every dtype: what is rounded there is another expert, not a last bit.
    """

    config: Experts
    router: Projection
    gate_up: Projection
    down: Projection

    @classmethod
    def of(cls, mlp: ExpertMLP, packed: Packed) -> PackedExperts:
        """Pack them."""
        return cls(
            config=mlp.config,
            router=Projection.packed(mlp.router, PackedWeight),
            gate_up=Projection.packed(mlp.gate_up, packed, is_gated=True),
            down=Projection.packed(mlp.down, packed),
        )

    @property
    def nbytes(self) -> int:
        """What they take."""
        return self.router.nbytes + self.gate_up.nbytes + self.down.nbytes

    def added(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        exact_norm: Operation | None,
        room: ExpertRoom,
        activation: Activation,
        ranks: Ranks | None = None,
    ) -> list[Operation | Call]:
        """Add to `hidden` what each token's experts make of its `normed` row.

        `exact_norm` writes these rows to `room.exact`, None where they are float32 as they are.
        """
        config, num_tokens = self.config, len(hidden)
        num_rows = num_tokens * config.top_k
        logits, spread = room.logits[:num_tokens], room.spread[:num_rows]
        wide, gated = room.wide[:num_rows], room.gated[:num_rows]
        planes = room.planes[:num_rows]
        routes = Routes(num_tokens, config.num_experts, config.top_k)
        exact = normed if exact_norm is None else room.exact[:num_tokens]
        return [
            *([] if exact_norm is None else [exact_norm]),
            self.router.of(exact, logits),
            *routes.choose(logits, is_normalized=config.is_normalized),
            routes.spread(normed, spread),
            *self.gate_up.gated(spread, wide, gated, activation, routes.groups),
            *zeros_unless(keeps_sum(ranks), hidden),
            *self.down.added_by_token(gated, hidden, planes, routes.groups),
            *added_up(hidden, ranks),
        ]


class ExpertRoom:
    """Where the numbers of experts lie, for up to `num_tokens` tokens.

    Attributes:
        exact: Rows as the router reads them, where products read others.
        logits: The router's.
        spread: A row for each expert that a token goes to; what follows likewise.
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
    """Make programs of what is between calls: where there are no calls, of all of it one."""
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


def keeps_sum(ranks: Ranks | None) -> bool:
    """Whether this shard puts what was there before, which all have, into the sum: one must."""
    return ranks is None or ranks.shard.rank == 0


def zeros_unless(is_kept: bool, summand: torch.Tensor) -> list[Call]:
    """Return the call that clears a sum before it is added to, unless it is kept."""
    return [] if is_kept else [summand.zero_]


def added_up(summand: torch.Tensor, ranks: Ranks | None) -> list[Call]:
    """Return the call that makes the summand of each shard the sum of all; alone there is none."""
    return [] if ranks is None or ranks.shard.size == 1 else [partial(ranks.add_up, summand)]


def gated_rows(num_rows: int, size: int, packed: Packed) -> torch.Tensor:
    """Return room for what `Projection.gated` makes."""
    return torch.empty(num_rows, size) if packed is Int8Weight else packed.inputs(num_rows, size)


def bytes_of(part: Any) -> int:
    """Return what a tensor or a packed part takes; None nothing."""
    return 0 if part is None else int(part.nbytes)
