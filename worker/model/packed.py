"""Feed-forwards packed for compiled loops, one for all tokens or made of experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from kernels import Activation
from kernels.cpu.experts import Routes
from kernels.cpu.groups import Groups
from kernels.cpu.linear import PackedWeight
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.linear_int8 import Int8Weight
from kernels.cpu.program import Operation
from kernels.cpu.rows_int8 import to_planes
from kernels.cpu.rowwise import gate, norm
from kernels.cpu.simd import PANEL
from worker.model.families import Experts
from worker.model.weights import ExpertMLP, GatedMLP, Linear

Weight = PackedWeight | PairedWeight | Int8Weight
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

    def of_rows(
        self, x: torch.Tensor, y: torch.Tensor, planes: torch.Tensor, groups: Groups
    ) -> list[Operation]:
        """Make y = x W^T + b of rows that are not yet as products take them: see `added`."""
        if isinstance(self.weight, Int8Weight):
            return [to_planes(x, planes), self.of(planes, y, groups)]
        return [self.of(x, y, groups)]

    def added(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        planes: torch.Tensor,
        added: torch.Tensor,
        eps: float,
    ) -> list[Operation]:
        """Make y += x W^T + b, normalized if there is a norm for it.

        `planes` is room for x as int8 weights take it, `added` for what is normalized.
        """
        program = []
        if isinstance(self.weight, Int8Weight):
            program.append(to_planes(x, planes))
            x = planes
        if self.norm is None:
            return [*program, self.weight.times(x, y, bias=self.bias, is_added=True)]
        times = self.weight.times(x, added, bias=self.bias)
        return [*program, times, norm(added, self.norm, eps, y, is_added=True)]

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
    ) -> list[Operation]:
        """Add to `hidden` what each token's experts make of its `normed` row.

        `exact_norm` writes these rows to `room.exact`, None where they are float32 as they are.
        """
        config, num_tokens = self.config, len(hidden)
        num_rows = num_tokens * config.top_k
        logits, spread = room.logits[:num_tokens], room.spread[:num_rows]
        wide, gated = room.wide[:num_rows], room.gated[:num_rows]
        planes, made = room.planes[:num_rows], room.made[:num_rows]
        routes = Routes(num_tokens, config.num_experts, config.top_k)
        exact = normed if exact_norm is None else room.exact[:num_tokens]
        return [
            *([] if exact_norm is None else [exact_norm]),
            self.router.of(exact, logits),
            *routes.choose(logits, is_normalized=config.is_normalized),
            routes.spread(normed, spread),
            *self.gate_up.gated(spread, wide, gated, activation, routes.groups),
            *self.down.of_rows(gated, made, planes, routes.groups),
            routes.gather(made, hidden),
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
        self.made = torch.empty(rows, hidden_size)


def gated_rows(num_rows: int, size: int, packed: Packed) -> torch.Tensor:
    """Return room for what `Projection.gated` makes."""
    return torch.empty(num_rows, size) if packed is Int8Weight else packed.inputs(num_rows, size)


def bytes_of(part: Any) -> int:
    """Return what a tensor or a packed part takes; None nothing."""
    return 0 if part is None else int(part.nbytes)
