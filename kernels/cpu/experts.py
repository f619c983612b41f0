"""Select the experts of each token, and gather the rows of each expert.

Rows are ordered by expert, so that the tokens of a step that use one expert are one matrix product
(`kernels.cpu.row_groups`). No sum crosses tokens, and a token's results are added in a fixed order,
so the other tokens of a batch change no bit of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.cpu.intrinsics import bytes_at, exp2, floats_at, ints_at, longs_at
from kernels.cpu.program import Operation
from kernels.cpu.row_groups import Groups, table_at
from kernels.cpu.tasks import allocate, free, inner
from kernels.cpu.threads import for_each_row, take

_LOG2_E = np.float32(1.4426950408889634)


class Routes:
    """The experts of a step's tokens: each token is routed to `top_k` of `num_experts`.

    Attributes:
        experts: [T, top_k] int32 experts of each token, the one with the highest score first.
        shares: [T, top_k] float32 weight of each of these experts.
        groups: The rows of each expert, with the token and the share of each row.
    """

    def __init__(self, num_tokens: int, num_experts: int, top_k: int) -> None:
        assert 0 < top_k <= num_experts
        self.num_experts, self.top_k = num_experts, top_k
        self.experts = torch.zeros(num_tokens, top_k, dtype=torch.int32)
        self.shares = torch.zeros(num_tokens, top_k)
        self.groups = Groups(num_tokens * top_k, num_experts)

    def choose(self, logits: torch.Tensor, *, is_normalized: bool) -> list[Operation]:
        """Return the operations that choose experts by the softmax of the logits.

        Args:
            logits: [T, num_experts or more] float32, contiguous.
            is_normalized: Scale the shares of each token so that they add up to 1.
        """
        assert logits.shape[1] >= self.num_experts and len(logits) == len(self.experts)
        chosen = _ChooseArguments(
            num_rows=len(logits),
            num_experts=self.num_experts,
            top_k=self.top_k,
            logits=logits.data_ptr(),
            stride=logits.shape[1] * 4,
            is_normalized=is_normalized,
            experts=self.experts.data_ptr(),
            shares=self.shares.data_ptr(),
        )
        grouped = _GroupArguments(
            num_pairs=self.experts.numel(),
            num_experts=self.num_experts,
            experts=self.experts.data_ptr(),
            top_k=self.top_k,
            shares=self.shares.data_ptr(),
            groups=self.groups.address,
        )
        kept = (logits, self)
        return [Operation(_choose, chosen, kept), Operation(_group, grouped, kept)]

    def spread(self, x: torch.Tensor, out: torch.Tensor) -> Operation:
        """Return the operation that copies each token's row of x to the rows of its experts.

        Args:
            x: [T, ...] inputs of any product.
            out: [T * top_k, ...] of the same kind.
        """
        assert x.dtype == out.dtype and x.shape[1] == out.shape[1] and x.stride(0) == out.stride(0)
        assert len(out) == len(x) * self.top_k == self.groups.num_rows
        arguments = _SpreadArguments(
            num_rows=len(out),
            tokens=self.groups.tokens.data_ptr(),
            x=x.data_ptr(),
            out=out.data_ptr(),
            stride=x.stride(0) * x.itemsize,
            size=x.shape[1] * x.itemsize,
        )
        return Operation(_spread, arguments, (x, out, self))


class _ChooseArguments(NamedTuple):
    num_rows: int
    num_experts: int
    top_k: int
    logits: int
    stride: int
    is_normalized: bool
    experts: int
    shares: int
    taken: int = 0


def _choose(a: _ChooseArguments, _thread: int) -> None:
    weights = allocate(a.num_experts * 4)
    for_each_row(a, _choose_row, weights)
    free(weights)


@inner
def _choose_row(a: _ChooseArguments, row: int, scratch: int) -> None:
    logits, weights = floats_at(a.logits + row * a.stride), floats_at(scratch)
    experts, shares = ints_at(a.experts), floats_at(a.shares)
    highest = logits[0]
    for i in range(1, a.num_experts):
        highest = logits[i] if logits[i] > highest else highest
    total = np.float32(0)
    for i in range(a.num_experts):
        weights[i] = exp2((logits[i] - highest) * _LOG2_E)
        total += weights[i]
    chosen_total = np.float32(0)
    first = row * a.top_k
    for j in range(first, first + a.top_k):
        # Of equal weights the first is chosen.  In a row of NaN the choice does not matter: shares
        # are NaN.
        best, weight = 0, np.float32(-1)
        for i in range(a.num_experts):
            if weights[i] > weight:
                best, weight = i, weights[i]
        experts[j], shares[j] = best, weights[best]
        chosen_total += weights[best]
        weights[best] = np.float32(-1)
    scale = np.float32(1) / (chosen_total if a.is_normalized else total)
    for j in range(first, first + a.top_k):
        shares[j] *= scale


class _GroupArguments(NamedTuple):
    num_pairs: int
    num_experts: int
    top_k: int
    experts: int
    shares: int
    groups: int
    taken: int = 0


def _group(a: _GroupArguments, _thread: int) -> None:
    """Number the rows by expert, then by token; a single thread does all of it."""
    if take(a, 1) > 0:
        return
    table = table_at(a.groups)
    experts, shares = ints_at(a.experts), floats_at(a.shares)
    tokens, row_shares = ints_at(table.tokens), floats_at(table.shares)
    memory = allocate(a.num_experts * 8)
    following = longs_at(memory)
    for i in range(a.num_experts):
        following[i] = 0
    for pair in range(a.num_pairs):
        following[experts[pair]] += 1
    _write_groups(table, following, a.num_experts)
    for pair in range(a.num_pairs):
        row = following[experts[pair]]
        tokens[row], row_shares[row] = pair // a.top_k, shares[pair]
        following[experts[pair]] += 1
    free(memory)


@inner
def _write_groups(table: Any, following: Any, num_experts: int) -> None:
    """Write a group for each expert that has rows, and each expert's first row to `following`."""
    matrices, starts = ints_at(table.matrices), ints_at(table.starts)
    groups, start = 0, 0
    for i in range(num_experts):
        count = following[i]
        following[i] = start
        if count:
            matrices[groups], starts[groups] = i, start
            groups += 1
            start += count
    starts[groups] = start
    table.num_groups = groups


class _SpreadArguments(NamedTuple):
    num_rows: int
    tokens: int
    x: int
    out: int
    stride: int
    size: int
    taken: int = 0


def _spread(a: _SpreadArguments, _thread: int) -> None:
    for_each_row(a, _spread_row, 0)


@inner
def _spread_row(a: _SpreadArguments, row: int, _: int) -> None:
    token = ints_at(a.tokens)[row]
    x, out = bytes_at(a.x + token * a.stride), bytes_at(a.out + row * a.stride)
    for i in range(a.size):
        out[i] = x[i]
