"""Compute y = x W^T on the CPU in bfloat16: exact products, float32 sums.

W is packed into panels: 16 output columns, with two weights of each column adjacent for each pair
of inputs (`[N / 16, K / 32, 16, 16, 2]`).  This is what the processor's tiles take, a step of 32
inputs at a time.  32 rows of x are multiplied with two panels in registers, 16 rows or fewer with
four.  Without tiles (`kernels.cpu.amx`), the same panels are multiplied by dots or by vectors: see
`kernels.cpu.bfloat16_methods`.  Each method sums a row in a fixed order, whatever the other rows of
the batch are.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from kernels.contract import SILU, Activation
from kernels.cpu import amx
from kernels.cpu.amx import CONFIGURATION_BYTES, STEP, STEP_BYTES, TILE_ROWS
from kernels.cpu.bfloat16_methods import Way
from kernels.cpu.dot_bfloat16 import dot_product
from kernels.cpu.large_pages import in_large_pages
from kernels.cpu.linear import Arguments, Weight, begin_with_bias
from kernels.cpu.program import Operation
from kernels.cpu.row_groups import (
    Groups,
    add_to_tokens,
    coming_weights,
    in_stack,
    next_units,
    rows_of,
)
from kernels.cpu.rows_bfloat16 import gate_pair
from kernels.cpu.simd import PANEL, pair_product
from kernels.cpu.tasks import Task, allocate, free, inner
from kernels.cpu.tiles import TWO_TILES, num_together, rows_product

# Bytes of x that stay in the L2 cache while a chunk of panels is multiplied with them.
_BLOCK_BYTES = 1 << 19
# Steps of two panels that stay in the L1 cache while rows are multiplied with them, and the most
# parts into which K is split for that: with more, reading sums again costs more than reading
# weights from L2.
_NEAR_STEPS, _MAX_PARTS = 12, 2
# Rows multiplied at a time with one panel by vectors.
_FEW = 3
# Rows multiplied at a time with two panels by dots, and with four.
_MANY_DOTS, _FEW_DOTS = 12, 6

_by_tiles = rows_product(of_bytes=False)
_dots_by_four = dot_product(_FEW_DOTS, 4)
_dots_by_two, _dots_by_one = dot_product(_MANY_DOTS, 2), dot_product(_MANY_DOTS, 1)
_by_vectors = pair_product(_FEW)


class GateableWeight(Weight):
    """A weight matrix whose halves may be a gate and an up projection."""

    __slots__ = ()

    def times_gated(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        activation: Activation = SILU,
        bias: torch.Tensor | None = None,
        groups: Groups | None = None,
        way: Way | None = None,
    ) -> Operation:
        """Return the operation y = activation(gate) * up; gate and up are halves of x W^T + bias.

        The weight must have been packed with `is_gated`.

        Args:
            x: See `times`, also for `groups` and `way`.
            y: [T, N / 2] as the next product takes it.
            bias: [N] float32, contiguous; [E, N] for a stack.
        """
        assert y.shape == (len(x), self.shape[0] // 2)
        bias = None if bias is None else woven(bias, -1)
        return self._operation(x, y, bias, 2, groups, way=way, activation=activation)


class PairedWeight(GateableWeight):
    """A weight matrix [N, K], or a stack of E, in panels of pairs of bfloat16.

    N is padded to whole panels, K to whole steps.

    Attributes:
        panels: [E * ceil(N / 16), ceil(K / 32), 16, 16, 2] bfloat16.
    """

    __slots__ = ()

    def __init__(self, weight: torch.Tensor, *, is_gated: bool = False) -> None:
        """Pack a matrix; `is_gated` interleaves the panels of its first and its second half."""
        rows, columns = self.shape = (weight.shape[-2], weight.shape[-1])
        weight = woven(weight, -2) if is_gated else weight
        padded = pad(weight.bfloat16(), (0, -columns % STEP, 0, -rows % PANEL))
        pairs = padded.view(-1, PANEL, padded.shape[-1] // STEP, STEP // 2, 2)
        self.panels, self.scales = in_large_pages(pairs.permute(0, 2, 3, 1, 4)), None

    @staticmethod
    def inputs(num_rows: int, size: int) -> torch.Tensor:
        """Return a buffer for x: [num_rows, size] bfloat16, with zeros up to a whole step.

        Each row is one step longer, so that rows are not a power of two apart: all rows of a tile
        would fall into one set of the cache.
        """
        stride = -(-size // STEP) * STEP + STEP
        return torch.zeros(num_rows, stride, dtype=torch.bfloat16)[:, :size]

    def _rows_in_block(self, x: torch.Tensor) -> int:
        assert x.shape[1] == self.shape[1] and x.dtype is torch.bfloat16
        assert x.stride(0) >= self.panels.shape[1] * STEP and x.stride(1) == 1
        return max(TWO_TILES, _BLOCK_BYTES // (x.stride(0) * 2) // TWO_TILES * TWO_TILES)

    def _task(self, way: Way) -> Task:
        return _TASKS[way]


def woven(rows: torch.Tensor, axis: int) -> torch.Tensor:
    """Return rows with the panels of their first and of their second half interleaved.

    Args:
        axis: The axis of the rows, negative: counted from the last.
    """
    at = rows.ndim + axis
    panels = rows.view(*rows.shape[:at], 2, -1, PANEL, *rows.shape[at + 1 :])
    return panels.transpose(at, at + 1).reshape(rows.shape)


def _multiply_by_tiles(a: Arguments, thread: int) -> None:
    num_steps, x_stride = a.num_steps, a.x_stride
    panel_bytes = num_steps * STEP_BYTES
    parts = -(-num_steps // _NEAR_STEPS)
    near = -(-num_steps // parts) if parts <= _MAX_PARTS else num_steps
    sums = allocate(max(a.block * 2, TILE_ROWS * 4) * PANEL * 4)
    group, unit, count = 0, 0, 0
    while True:
        group, unit, count = next_units(a, thread, group, unit, count)
        if count == 0:
            break
        first, (start, stop) = in_stack(a, group, unit), rows_of(a, group)
        first, last = first * a.together, (first + count) * a.together
        left = (stop - start) % TWO_TILES
        begin, whole = start, stop - left
        while begin < stop:
            end = min(whole, begin + a.block) if begin < whole else stop
            amx.configure(a.tiles + (0 if begin < whole else left * CONFIGURATION_BYTES))
            rows, x = end - begin, a.x + begin * x_stride
            panel = first
            while panel < last:
                width = num_together(rows, last - panel)
                y, y_stride, has_sums = _begin(a, panel, width, begin, end, sums)
                w = a.weight + panel * panel_bytes
                later = w + width * panel_bytes
                if panel + width == last:
                    later = coming_weights(a, thread, group, unit, a.together * panel_bytes)
                operands = (x, x_stride, y, y_stride, rows, num_steps, near, has_sums, later)
                _by_tiles(width, w, *operands)
                _end(a, panel, width, begin, end, sums)
                panel += width
            begin = end
    amx.release()
    free(sums)


def _multiply_by_dots(a: Arguments, thread: int) -> None:
    x_stride, panel_bytes = a.x_stride, a.num_steps * STEP_BYTES
    sums = allocate(max(a.block * 2, _FEW_DOTS * 4) * PANEL * 4)
    group, unit, count = 0, 0, 0
    while True:
        group, unit, count = next_units(a, thread, group, unit, count)
        if count == 0:
            break
        first, (start, stop) = in_stack(a, group, unit), rows_of(a, group)
        first, last = first * a.together, (first + count) * a.together
        for begin in range(start, stop, a.block):
            end = min(stop, begin + a.block)
            panel = first
            while panel < last:
                left = last - panel
                width = 4 if left >= 4 and stop - start <= _FEW_DOTS else 2 if left >= 2 else 1
                y, y_stride, has_sums = _begin(a, panel, width, begin, end, sums)
                w = a.weight + panel * panel_bytes
                later = w + width * panel_bytes
                if panel + width == last:
                    unit_bytes = a.together * panel_bytes
                    later = coming_weights(a, thread, group, unit, unit_bytes)
                for row in range(begin, end, _MANY_DOTS):
                    x, to = a.x + row * x_stride, y + (row - begin) * y_stride
                    _dots(a, width, w, x, to, y_stride, end - row, has_sums, later)
                    later = w  # the next weights have been prefetched
                _end(a, panel, width, begin, end, sums)
                panel += width
    free(sums)


@inner
def _dots(a: Arguments, width: int, *operands: int) -> None:
    """Multiply up to _MANY_DOTS rows by `width` panels."""
    w, x, y, y_stride, rows, has_sums, later = operands
    x_stride, steps, panel_bytes = a.x_stride, a.num_steps, a.num_steps * STEP_BYTES
    if width == 4:
        _dots_by_four(w, x, x_stride, y, y_stride, steps, rows, has_sums, panel_bytes, later)
    elif width == 2:
        _dots_by_two(w, x, x_stride, y, y_stride, steps, rows, has_sums, panel_bytes, later)
    else:
        _dots_by_one(w, x, x_stride, y, y_stride, steps, rows, has_sums, panel_bytes, later)


def _multiply_by_vectors(a: Arguments, thread: int) -> None:
    num_steps, x_stride, width = a.num_steps, a.x_stride, a.together
    sums = allocate(a.block * 2 * PANEL * 4)
    group, unit, count = 0, 0, 0
    while True:
        group, unit, count = next_units(a, thread, group, unit, count)
        if count == 0:
            break
        first, (start, stop) = in_stack(a, group, unit), rows_of(a, group)
        for begin in range(start, stop, a.block):
            end = min(stop, begin + a.block)
            for panel in range(first * width, (first + count) * width, width):
                y, y_stride, has_sums = _begin(a, panel, width, begin, end, sums)
                for part in range(width):
                    w = a.weight + (panel + part) * num_steps * STEP_BYTES
                    for row in range(begin, end, _FEW):
                        x = a.x + row * x_stride
                        to = y + (row - begin) * y_stride + part * PANEL * 4
                        _by_vectors(w, x, x_stride, to, y_stride, num_steps, end - row, has_sums)
                _end(a, panel, width, begin, end, sums)
    free(sums)


@inner
def _begin(
    a: Arguments, panel: int, width: int, begin: int, end: int, sums: int
) -> tuple[int, int, int]:
    """Return where to sum rows [begin, end): (address, row stride, whether it has values).

    Sums are added in y, or in `sums` if y is gated or by token.  The bias is written there first.
    """
    column = panel % (a.num_units * a.together) * PANEL
    to, stride = a.y + begin * a.y_stride + column * 4, a.y_stride
    if a.together == 2 or a.is_by_token:
        to, stride = sums, width * PANEL * 4
    if a.bias:
        begin_with_bias(a, panel, width, to, stride, end - begin)
    return to, stride, 1 if a.bias else a.is_added


@inner
def _end(a: Arguments, panel: int, width: int, begin: int, end: int, sums: int) -> None:
    """Write gated `sums` to y, or add `sums` to the rows of their tokens."""
    if a.is_by_token:
        column = panel % a.num_units * PANEL
        add_to_tokens(a, sums, width * PANEL * 4, width, column, begin, end)
    if a.together == 2:
        column = panel // 2 % a.num_units * PANEL
        for row in range(begin, end):
            for pair in range(width // 2):
                gate = sums + ((row - begin) * width + 2 * pair) * PANEL * 4
                out = a.y + row * a.y_stride + (column + pair * PANEL) * 2
                gate_pair(gate, gate + PANEL * 4, out, a.linear, a.cubic, a.limit, a.shift)


_TASKS = {
    Way.VECTORS: _multiply_by_vectors,
    Way.DOTS: _multiply_by_dots,
    Way.TILES: _multiply_by_tiles,
}
