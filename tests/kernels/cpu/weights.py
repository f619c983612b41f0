"""Products with a weight of any kind, by any way to multiply."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from kernels.cpu.bfloat16_methods import Way
from kernels.cpu.linear import PackedWeight
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.linear_int8 import Int8Weight
from kernels.cpu.program import Operation, Program
from kernels.cpu.row_groups import Groups
from kernels.cpu.rows_int8 import to_planes
from tests.kernels.cpu.paired import WAYS

Weight = PackedWeight | PairedWeight | Int8Weight
# Dots are of bfloat16.
INT8_WAYS = [way for way in WAYS if way is not Way.DOTS]
# Of each kind of weight, with every way to multiply it.
KINDS: list[tuple[type[Weight], Way | None]] = [
    (PackedWeight, None),
    *((PairedWeight, way) for way in WAYS),
    *((Int8Weight, way) for way in INT8_WAYS),
]


def inputs_of(kind: type[Weight], x: torch.Tensor) -> torch.Tensor:
    inputs = kind.inputs(len(x), x.shape[1])
    if kind is Int8Weight:
        Program([to_planes(x, inputs)]).run()
    else:
        inputs.copy_(x)
    return inputs


def times(
    weight: Weight,
    x: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    way: Way | None,
    groups: Groups | None = None,
    *,
    is_added: bool = True,
    is_by_token: bool = False,
) -> Operation:
    rest: dict[str, Any] = {"groups": groups, "is_added": is_added, "is_by_token": is_by_token}
    if not isinstance(weight, PackedWeight):
        rest["way"] = way
    return weight.times(x, y, bias=bias, **rest)


def product(
    x: torch.Tensor,
    weight: Weight,
    way: Way | None = None,
    y: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + bias, plus y, without the padding."""
    padded = torch.full((len(x), weight.num_columns), torch.nan)
    if y is not None:
        padded[:, : y.shape[1]] = y
    if bias is not None:
        bias = pad(bias, (0, weight.num_columns - len(bias)))
    inputs = inputs_of(type(weight), x)
    Program([times(weight, inputs, padded, bias, way, is_added=y is not None)]).run()
    return padded[:, : weight.shape[0]]


def gated_room(kind: type[Weight], rows: int, size: int) -> torch.Tensor:
    """Return room for gated rows, which the next matrix takes as they are."""
    return kind.inputs(rows, size) if kind is PairedWeight else torch.empty(rows, size)
