"""Compute y = x W^T from 8-bit weights: x is quantized to 15 bits, and integer sums are exact.

W is packed into panels: 16 output columns, with four weights of each column adjacent for every four
inputs (`[N / 16, K / 64, 16, 16, 4]`), and a scale for each column.  That is half the bytes of
bfloat16 for a step that waits for memory.  A row of x is quantized to two planes of int8 and a
scale (`kernels.cpu.rows_int8`).  Its planes are two rows of the integer product, which is computed
by tiles (`kernels.cpu.amx`), or by vectors where there are none.  Sums are integers, so no bit of a
result depends on the order of additions, on the other rows of the batch, or on the processor.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from kernels.cpu import amx
from kernels.cpu.amx import BYTES_STEP, CONFIGURATION_BYTES, STEP_BYTES
from kernels.cpu.bfloat16_methods import Way
from kernels.cpu.large_pages import in_large_pages
from kernels.cpu.linear import Arguments
from kernels.cpu.linear_bfloat16 import GateableWeight, woven
from kernels.cpu.row_groups import add_to_tokens, coming_weights, in_stack, next_units, rows_of
from kernels.cpu.rows_int8 import finish_sums, gate_floats, room_for_planes
from kernels.cpu.simd import PANEL
from kernels.cpu.simd_int8 import QUAD, byte_product
from kernels.cpu.tasks import Task, allocate, free, inner
from kernels.cpu.tiles import TWO_TILES, num_together, rows_product

# The most inputs whose sum of products, 127 * 127 each at most, fits an int32.
MAX_INPUTS = (1 << 31) // 127**2
# Planes multiplied at a time with one panel by vectors.
_FEW = 4
# Bytes of x that stay in the L2 cache while a chunk of panels is multiplied with them.
_BLOCK_BYTES = 1 << 19
# The most steps of two panels that stay in the L1 cache while rows are multiplied with them.
_NEAR_STEPS = 20

_by_tiles = rows_product(of_bytes=True)
_by_vectors = byte_product(_FEW)


class Int8Weight(GateableWeight):
    """A weight matrix [N, K], or a stack of E, quantized to int8.

    N is padded to whole panels, K to whole steps.

    Attributes:
        panels: [E * ceil(N / 16), ceil(K / 64), 16, 16, 4] int8.
        scales: [E * ceil(N / 16) * 16] float32 scale of each column.
    """

    __slots__ = ()

    def __init__(self, weight: torch.Tensor, *, is_gated: bool = False) -> None:
        """Quantize and pack a matrix; `is_gated` interleaves the panels of its halves."""
        rows, columns = self.shape = (weight.shape[-2], weight.shape[-1])
        assert 0 < columns <= MAX_INPUTS
        wide = woven(weight, -2).float() if is_gated else weight.float()
        scales = wide.abs().amax(-1) / 127
        # A column of zeros may have any scale but 0.
        rounded = (wide / scales.clamp(min=torch.finfo().tiny)[..., None]).round().to(torch.int8)
        padded = pad(rounded, (0, -columns % BYTES_STEP, 0, -rows % PANEL))
        quads = padded.view(-1, PANEL, padded.shape[-1] // BYTES_STEP, BYTES_STEP // QUAD, QUAD)
        self.panels = in_large_pages(quads.permute(0, 2, 3, 1, 4))
        self.scales = pad(scales, (0, -rows % PANEL)).flatten()

    @staticmethod
    def inputs(num_rows: int, size: int) -> torch.Tensor:
        """Return a buffer for x; see `room_for_planes`."""
        return room_for_planes(num_rows, size)

    def _rows_in_block(self, x: torch.Tensor) -> int:
        stride = x.stride(0)
        assert x.dtype is torch.int8 and stride >= 2 * (self.panels.shape[1] + 1) * BYTES_STEP
        planes = min(2 * len(x), 2 * _BLOCK_BYTES // stride)
        return max(TWO_TILES, -(-planes // TWO_TILES) * TWO_TILES)

    def _task(self, way: Way) -> Task:
        return _multiply_by_tiles if way is Way.TILES else _multiply_by_vectors


def _multiply_by_tiles(a: Arguments, thread: int) -> None:
    num_steps, x_stride = a.num_steps, a.x_stride // 2
    panel_bytes = num_steps * STEP_BYTES
    parts = -(-num_steps // _NEAR_STEPS)
    near = -(-num_steps // parts)
    sums = allocate(a.block * 2 * PANEL * 4)
    group, unit, count = 0, 0, 0
    while True:
        group, unit, count = next_units(a, thread, group, unit, count)
        if count == 0:
            break
        first, (start, stop) = in_stack(a, group, unit), rows_of(a, group)
        first, last = first * a.together, (first + count) * a.together
        begin, stop = 2 * start, 2 * stop
        left = (stop - begin) % TWO_TILES
        whole = stop - left
        while begin < stop:
            end = min(whole, begin + a.block) if begin < whole else stop
            amx.configure(a.tiles + (0 if begin < whole else left * CONFIGURATION_BYTES))
            planes, x = end - begin, a.x + begin * x_stride
            panel = first
            while panel < last:
                width = num_together(planes, last - panel)
                w = a.weight + panel * panel_bytes
                later = w + width * panel_bytes
                if panel + width == last:
                    later = coming_weights(a, thread, group, unit, a.together * panel_bytes)
                operands = (x, x_stride, sums, width * PANEL * 4, planes, num_steps, near, 0, later)
                _by_tiles(width, w, *operands)
                _finish(a, panel, width, begin, end, sums)
                panel += width
            begin = end
    amx.release()
    free(sums)


def _multiply_by_vectors(a: Arguments, thread: int) -> None:
    num_steps, x_stride, width = a.num_steps, a.x_stride // 2, a.together
    panel_bytes, stride = num_steps * STEP_BYTES, width * PANEL * 4
    sums = allocate(a.block * 2 * PANEL * 4)
    group, unit, count = 0, 0, 0
    while True:
        group, unit, count = next_units(a, thread, group, unit, count)
        if count == 0:
            break
        first, (start, stop) = in_stack(a, group, unit), rows_of(a, group)
        last = (first + count) * width
        for begin in range(2 * start, 2 * stop, a.block):
            end = min(2 * stop, begin + a.block)
            for panel in range(first * width, last, width):
                for part in range(width):
                    w = a.weight + (panel + part) * panel_bytes
                    later = w + panel_bytes
                    if panel + part + 1 == last:
                        unit_bytes = width * panel_bytes
                        later = coming_weights(a, thread, group, unit, unit_bytes)
                    for plane in range(begin, end, _FEW):
                        x = a.x + plane * x_stride
                        to = sums + (plane - begin) * stride + part * PANEL * 4
                        _by_vectors(w, x, x_stride, to, stride, num_steps, end - plane, later)
                        later = w  # the next weights have been prefetched
                _finish(a, panel, width, begin, end, sums)
    free(sums)


@inner
def _finish(a: Arguments, panel: int, width: int, begin: int, end: int, sums: int) -> None:
    """Combine the sums of planes [begin, end), and write rows of y."""
    stride, at = width * PANEL * 4, panel * PANEL * 4
    column = panel % (a.num_units * a.together) * PANEL * 4
    # If y is gated or by token, float32 results first replace the integer sums.
    to, to_stride = a.y + begin // 2 * a.y_stride + column, a.y_stride
    if a.together == 2 or a.is_by_token:
        to, to_stride = sums, 2 * stride
    for row in range((end - begin) // 2):
        scale = a.x + (begin // 2 + row + 1) * a.x_stride - 4
        for part in range(width):
            offset = part * PANEL * 4
            high, y = sums + 2 * row * stride + offset, to + row * to_stride + offset
            bias = a.bias + at + offset if a.bias else 0
            before = y if a.is_added else 0
            finish_sums(high, stride, scale, a.scales + at + offset, bias, before, y)
    if a.is_by_token:
        add_to_tokens(a, sums, 2 * stride, width, column // 4, begin // 2, end // 2)
    if a.together == 2:
        for row in range((end - begin) // 2):
            y = a.y + (begin // 2 + row) * a.y_stride + column // 2
            for pair in range(width // 2):
                gate = sums + 2 * (row * stride + pair * PANEL * 4)
                out = y + pair * PANEL * 4
                gate_floats(gate, gate + PANEL * 4, out, a.linear, a.cubic, a.limit, a.shift)
