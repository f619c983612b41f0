"""Compute y = x W^T on the CPU, for one row or thousands, from weights stored in 16 bits.

W is packed into panels: 16 output columns, with their 16 weights for each input adjacent (`[N / 16,
K, 16]`).  A panel is read sequentially while several rows of x are multiplied with it in registers;
one or two rows are multiplied with several panels at a time.  A panel stays in the L1 cache for all
rows, so each weight is read from memory once per call.  x, y and every product are float32, and a
bfloat16 weight is widened exactly when it is loaded, so the result is that of float32 weights at
half the bytes.  A row is summed in a fixed order, whatever the other rows of the batch are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from kernels.contract import SILU, Activation
from kernels.cpu import amx, simd
from kernels.cpu.bfloat16_methods import Way, known_way
from kernels.cpu.intrinsics import floats_at, target_features
from kernels.cpu.large_pages import in_large_pages
from kernels.cpu.program import Operation
from kernels.cpu.row_groups import (
    Groups,
    add_to_tokens,
    coming_weights,
    first_weights,
    in_stack,
    next_units,
    rows_of,
)
from kernels.cpu.simd import PANEL, bytes_of, panel_product
from kernels.cpu.tasks import Task, allocate, free, inner

# Rows whose sums fit in registers beside a panel: there are 32 registers of 16 numbers, or 16 of 8.
MAX_ROWS = 12 if "+avx512f" in target_features() else 6
_BLOCK_BYTES = 1 << 18
ELEMENTS = {getattr(torch, name): code for code, name in enumerate(simd.ELEMENTS)}

# Without prefetching, a processor reads ahead to the end of a page and then waits, a quarter of the
# time.
_product = panel_product(MAX_ROWS, prefetch=True)
# Few rows use several panels: otherwise each addition would wait for the one before.
_product_of_two = panel_product(2, 2, prefetch=True)
_product_of_one = panel_product(1, 4, prefetch=True)


class Weight(ABC):
    """A weight matrix [N, K], or a stack of E, packed into panels of 16 columns.

    Attributes:
        shape: (N, K).
        panels: [E * panels of a matrix, steps of K, ...], packed as each subclass needs.
        scales: The scale of each column of quantized weights; None for others.
    """

    __slots__ = ("panels", "scales", "shape")

    shape: tuple[int, int]
    panels: torch.Tensor
    scales: torch.Tensor | None

    @property
    def num_columns(self) -> int:
        """Columns of y: N, padded to whole panels."""
        return -(-self.shape[0] // PANEL) * PANEL

    @property
    def nbytes(self) -> int:
        """Size of the matrix in bytes."""
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def times(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        is_added: bool = False,
        groups: Groups | None = None,
        is_by_token: bool = False,
        way: Way | None = None,
    ) -> Operation:
        """Return the operation y = x W^T + bias, plus the earlier y if `is_added`.

        Args:
            x: [T, ...] created by `inputs`, or [T, K] contiguous float32 for `PackedWeight`.
            y: [T, num_columns] float32, contiguous.
            bias: [num_columns] float32, contiguous; [E, num_columns] for a stack.
            groups: The rows that are multiplied by each matrix of a stack; None: all by the first.
            is_by_token: y has a row for each token of the groups, to which every result of the
                token is added, times its share.
            way: One of `known_ways`; None for the fastest.
        """
        assert y.shape[1] == self.num_columns and (is_by_token or len(y) == len(x))
        return self._operation(
            x, y, bias, 1, groups, is_added=is_added, is_by_token=is_by_token, way=way
        )

    @abstractmethod
    def _rows_in_block(self, x: torch.Tensor) -> int:
        """Return how many rows of x stay in the L2 cache while a chunk of panels is multiplied."""

    @abstractmethod
    def _task(self, way: Way) -> Task:
        """Return the task that threads run."""

    def _operation(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        together: int,
        groups: Groups | None,
        *,
        is_added: bool = False,
        is_by_token: bool = False,
        way: Way | None,
        activation: Activation = SILU,
    ) -> Operation:
        num_units, num_threads = self.num_columns // PANEL // together, torch.get_num_threads()
        address = self.panels.data_ptr()
        rows = groups or Groups(len(x))
        arguments = Arguments(
            groups=rows.address,
            num_units=num_units,
            together=together,
            num_threads=num_threads,
            element=ELEMENTS.get(self.panels.dtype, 0),
            weight=address,
            scales=0 if self.scales is None else self.scales.data_ptr(),
            num_steps=self.panels.shape[1],
            x=x.data_ptr(),
            x_stride=x.stride(0) * x.itemsize,
            y=y.data_ptr(),
            y_stride=y.stride(0) * y.itemsize,
            block=self._rows_in_block(x),
            is_added=is_added,
            is_by_token=is_by_token,
            bias=0 if bias is None else bias.data_ptr(),
            **activation._asdict(),
            tiles=amx.configurations().ctypes.data,
        )
        size = together * self.panels[:1].nbytes
        weights = first_weights(address, num_units, num_threads, size)
        kept = (x, self.panels, self.scales, y, bias, rows)
        return Operation(self._task(known_way(way)), arguments, kept, None if groups else weights)


class Arguments(NamedTuple):
    """State shared by the threads of one product."""

    groups: int
    num_units: int  # of a matrix; a unit is a panel, or a panel of the gate and its panel of up
    together: int  # panels of a unit; if they are two, y is gated
    num_threads: int
    element: int  # of the panels, unless they are quantized
    weight: int
    scales: int  # 0 for none
    num_steps: int
    x: int
    x_stride: int
    y: int
    y_stride: int
    block: int  # rows, or planes of rows, that a chunk is multiplied with at a time
    is_added: bool
    is_by_token: bool
    bias: int  # 0 for none
    linear: float  # of the activation, if y is gated; so are the next three
    cubic: float
    limit: float
    shift: float
    tiles: int  # see `amx.configurations`
    # Addresses of the panels that threads of even and of odd numbers read first in the next
    # product.
    next_even: int = 0
    next_odd: int = 0
    taken: int = 0  # units, see `threads.next_chunk`


class PackedWeight(Weight):
    """A weight matrix whose products are float32, whatever dtype it has.

    Attributes:
        panels: [E * ceil(N / 16), K, 16] in the dtype of the given matrix.
    """

    __slots__ = ()

    def __init__(self, weight: torch.Tensor) -> None:
        rows, columns = self.shape = (weight.shape[-2], weight.shape[-1])
        if not self.fits(weight):
            raise ValueError(f"[{rows}, {columns}] of {weight.dtype} has no packed form")
        if rows % PANEL:
            weight = pad(weight, (0, 0, 0, -rows % PANEL))
        panels = weight.view(-1, PANEL, columns).transpose(1, 2)
        self.panels, self.scales = in_large_pages(panels), None

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Return whether a matrix can be packed."""
        return weight.shape[-1] > 0 and weight.dtype in ELEMENTS

    @staticmethod
    def inputs(num_rows: int, size: int) -> torch.Tensor:
        """Return a buffer for x: [num_rows, size] float32."""
        return torch.empty(num_rows, size)

    def _rows_in_block(self, x: torch.Tensor) -> int:
        assert x.shape[1] == self.shape[1]
        return max(MAX_ROWS, _BLOCK_BYTES // (4 * self.shape[1]) // MAX_ROWS * MAX_ROWS)

    def _task(self, way: Way) -> Task:
        return _multiply_panels


def _multiply_panels(a: Arguments, thread: int) -> None:
    # Read these fields once: as far as the compiler knows, each store to y might change the record.
    element, weight, depth, y_stride = a.element, a.weight, a.num_steps, a.y_stride
    w_stride, x_stride = PANEL * bytes_of(element), depth * 4
    panel_bytes, block = depth * w_stride, a.block
    sums = allocate(block * PANEL * 4)
    has_sums = 1 if a.bias else a.is_added
    group, unit, count = 0, 0, 0
    while True:
        group, unit, count = next_units(a, thread, group, unit, count)
        if count == 0:
            break
        first, (first_row, end) = in_stack(a, group, unit), rows_of(a, group)
        last = first + count
        for begin in range(first_row, end, block):
            rows, from_x = min(block, end - begin), a.x + begin * x_stride
            panel = first
            while panel < last:
                w = weight + panel * panel_bytes
                width = _num_together(rows, last - panel)
                column = panel % a.num_units * PANEL
                to, stride = a.y + begin * y_stride + column * 4, y_stride
                if a.is_by_token:
                    to, stride = sums, width * PANEL * 4
                if a.bias:
                    begin_with_bias(a, panel, width, to, stride, rows)
                panel += width
                later = w + width * panel_bytes
                if panel >= last:
                    later = coming_weights(a, thread, group, unit, panel_bytes)
                lines = (w, w_stride, from_x, x_stride, to, stride)
                _multiply(width, element, *lines, depth, rows, has_sums, later)
                if a.is_by_token:
                    add_to_tokens(a, sums, stride, width, column, begin, begin + rows)
    free(sums)


@inner
def _num_together(rows: int, panels: int) -> int:
    """Return how many panels are multiplied with these rows at a time."""
    if rows == 1 and panels >= 4:
        return 4
    return 2 if rows <= 2 and panels >= 2 else 1


@inner
def begin_with_bias(a: Arguments, panel: int, width: int, y: int, y_stride: int, rows: int) -> None:
    """Write the bias of `width` panels to rows of y, or add it if `is_added`."""
    bias = floats_at(a.bias + panel * PANEL * 4)
    for row in range(rows):
        target = floats_at(y + row * y_stride)
        for column in range(width * PANEL):
            target[column] = bias[column] + (target[column] if a.is_added else np.float32(0))


@inner
def _multiply(width: int, *operands: int) -> None:
    """Multiply rows of x by `width` panels, and prefetch the panels at `later`."""
    element, w, w_stride, x, x_stride, y, y_stride, depth, rows, has_sums, later = operands
    panel_bytes = depth * w_stride
    if width == 4:
        _product_of_one(*operands[:-1], panel_bytes, later, w_stride)
        return
    if width == 2:
        _product_of_two(*operands[:-1], panel_bytes, later, w_stride)
        return
    # One panel is multiplied with groups of rows whose sizes differ by one at most.
    groups = -(-rows // MAX_ROWS)
    # Each of the first two groups prefetches half of the next panel, so memory is busy during both.
    parts = min(groups, 2)
    row = 0
    for group in range(groups):
        count = (rows - row) // (groups - group)
        part = later + panel_bytes // parts * min(group, parts - 1)
        lines = (w, w_stride, x + row * x_stride, x_stride, y + row * y_stride, y_stride)
        coming = (panel_bytes, part, w_stride // parts)
        _product(element, *lines, depth, count, has_sums, *coming)
        row += count
