"""Compute y = x W^T on the CPU, for one row or thousands, from weights stored in 16 bits.

W is packed into panels: 16 output columns, with their 16 weights for each input adjacent (`[N / 16,
K, 16]`).  A panel is read sequentially while several rows of x are multiplied with it in registers;
one or two rows are multiplied with several panels at a time.  A panel stays in the L1 cache for all
rows, so each weight is read from memory once per call.  x, y and every product are float32, and a
bfloat16 weight is widened exactly when it is loaded, so the result is that of float32 weights at
half the bytes.  A row is summed in a fixed order, whatever the other rows of the batch are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from kernels.cpu import simd
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
from kernels.cpu.tasks import allocate, free, inner

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


class PackedWeight:
    """A weight matrix [N, K], or a stack of E, in panels; N is padded to whole panels.

    Attributes:
        shape: (N, K).
        panels: [E * ceil(N / 16), K, 16] in the dtype of the given matrix.
    """

    __slots__ = ("panels", "shape")

    def __init__(self, weight: torch.Tensor) -> None:
        rows, columns = self.shape = (weight.shape[-2], weight.shape[-1])
        if not self.fits(weight):
            raise ValueError(f"[{rows}, {columns}] of {weight.dtype} has no packed form")
        if rows % PANEL:
            weight = pad(weight, (0, 0, 0, -rows % PANEL))
        self.panels = in_large_pages(weight.view(-1, PANEL, columns).transpose(1, 2))

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Return whether a matrix can be packed."""
        return weight.shape[-1] > 0 and weight.dtype in ELEMENTS

    @property
    def num_columns(self) -> int:
        """Columns of y: N, padded to whole panels."""
        return -(-self.shape[0] // PANEL) * PANEL

    @property
    def nbytes(self) -> int:
        """Size of the panels in bytes."""
        return self.panels.nbytes

    @staticmethod
    def inputs(num_rows: int, size: int) -> torch.Tensor:
        """Return a buffer for x: [num_rows, size] float32."""
        return torch.empty(num_rows, size)

    def times(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        is_added: bool = False,
        groups: Groups | None = None,
        is_by_token: bool = False,
    ) -> Operation:
        """Return the operation y = x W^T + bias, plus the earlier y if `is_added`.

        Args:
            x: [T, K] float32, contiguous.
            y: [T, num_columns] float32, contiguous.
            bias: [num_columns] float32, contiguous; [E, num_columns] for a stack.
            groups: The rows that are multiplied by each matrix of a stack; None: all by the first.
            is_by_token: y has a row for each token of the groups, to which every result of the
                token is added, times its share.
        """
        depth, num_panels = self.shape[1], self.num_columns // PANEL
        assert x.shape[1] == depth and y.shape[1] == self.num_columns
        assert is_by_token or len(y) == len(x)
        num_threads = torch.get_num_threads()
        address = self.panels.data_ptr()
        rows = groups or Groups(len(x))
        arguments = _Arguments(
            groups=rows.address,
            element=ELEMENTS[self.panels.dtype],
            num_units=num_panels,
            num_threads=num_threads,
            weight=address,
            x=x.data_ptr(),
            y=y.data_ptr(),
            depth=depth,
            y_stride=y.shape[1] * 4,
            is_added=is_added,
            is_by_token=is_by_token,
            bias=0 if bias is None else bias.data_ptr(),
        )
        weights = first_weights(address, num_panels, num_threads, self.panels[:1].nbytes)
        kept = (x, self.panels, y, bias, rows)
        return Operation(_multiply_panels, arguments, kept, None if groups else weights)


class _Arguments(NamedTuple):
    groups: int
    element: int
    num_units: int  # panels of a matrix
    num_threads: int
    weight: int
    x: int
    y: int
    depth: int
    y_stride: int
    is_added: bool
    is_by_token: bool
    bias: int  # 0 for none
    # Addresses of the panels that threads of even and of odd numbers read first in the next
    # product.
    next_even: int = 0
    next_odd: int = 0
    taken: int = 0  # panels, see `threads.next_chunk`


def _multiply_panels(a: _Arguments, thread: int) -> None:
    # Read these fields once: as far as the compiler knows, each store to y might change the record.
    element, weight, depth, y_stride = a.element, a.weight, a.depth, a.y_stride
    w_stride, x_stride = PANEL * bytes_of(element), depth * 4
    panel_bytes = depth * w_stride
    # Rows of x that stay in the L2 cache while a chunk of panels is multiplied with them.
    block = max(MAX_ROWS, _BLOCK_BYTES // x_stride // MAX_ROWS * MAX_ROWS)
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
                    _begin_with_bias(a, panel, width, to, stride, rows)
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
def _begin_with_bias(
    a: _Arguments, panel: int, width: int, y: int, y_stride: int, rows: int
) -> None:
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
