"""y = x W^T on the CPU, for one row or thousands, from weights kept in 16 bits.

Strategy: W is packed into panels of 16 output columns, one element of each for every input in turn
(`[N / 16, K, 16]`), so that a panel is read front to back while up to six rows of x meet it in
registers; one or two rows meet several panels at a time.  A panel stays in the first cache over all
rows: memory moves each weight once a call.  x and y are float32 and so is every product: a bfloat16
weight is widened exactly, on the way to the register.  Nothing here rounds to 16 bits, so the
result is that of float32 weights at half the bytes.  A row's sums are taken in one order: who
shares the batch changes no bit of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from kernels.cpu import simd
from kernels.cpu.intrinsics import floats_at, read
from kernels.cpu.pieces import compiled_next_piece, next_piece, take
from kernels.cpu.program import Operation
from kernels.cpu.simd import PANEL, panel_product
from kernels.cpu.threads import compiled, inner

# Rows whose sums fit the registers beside a panel's two vectors.
MAX_ROWS = 6
_BLOCK_BYTES = 1 << 18
ELEMENTS = {getattr(torch, name): code for code, name in enumerate(simd.ELEMENTS)}

# Left alone, processors fetch up to the end of a page and wait at each: a quarter of the time.
_product = panel_product(MAX_ROWS, fetch=True)
# Sums in more registers where rows are few, or each addition would wait for the one before.
_product_of_two = panel_product(2, 2, fetch=True)
_product_of_one = panel_product(1, 4, fetch=True)


class PackedWeight:
    """A weight matrix [N, K] in panels; N is padded to whole ones.

    Attributes:
        shape: (N, K).
        panels: [ceil(N / 16), K, 16] in the dtype it was given.
    """

    __slots__ = ("panels", "shape")

    def __init__(self, weight: torch.Tensor) -> None:
        rows, columns = self.shape = (weight.shape[0], weight.shape[1])
        if not self.fits(weight):
            raise ValueError(f"[{rows}, {columns}] of {weight.dtype} has no packed form")
        padded = -rows % PANEL
        if padded:
            weight = torch.cat((weight, weight.new_zeros(padded, columns)))
        self.panels = weight.view(-1, PANEL, columns).transpose(1, 2).contiguous()

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Whether a matrix can be packed."""
        return weight.shape[1] > 0 and weight.dtype in ELEMENTS

    @property
    def num_columns(self) -> int:
        """Columns of y: N, padded to whole panels."""
        return self.panels.shape[0] * PANEL


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    is_added: bool = False,
) -> Operation:
    """Make y = x W^T + bias, plus what y was if `is_added`.

    Args:
        x: [T, K] float32, contiguous.
        y: [T, weight.num_columns] float32, contiguous.
        bias: [weight.num_columns] float32, contiguous.
    """
    num_panels, depth, _ = weight.panels.shape
    assert x.shape[1] == depth and y.shape == (x.shape[0], weight.num_columns)
    num_threads = torch.get_num_threads()
    begins = [next_piece(0, num_panels, num_threads, thread)[0] for thread in range(2)]
    address, each = weight.panels.data_ptr(), weight.panels[:1].nbytes
    words = (
        ELEMENTS[weight.panels.dtype],
        num_panels,
        num_threads,
        address,
        x.data_ptr(),
        y.data_ptr(),
        depth,
        x.shape[0],
        y.shape[1] * 4,
        int(is_added),
        0 if bias is None else bias.data_ptr(),
    )
    weights = (address + begins[0] * each, address + begins[1] * each)
    return Operation(task(), words, (x, weight.panels, y, bias), weights)


@cache
def task() -> Any:
    """Return the compiled loop."""
    return compiled(_multiply_panels)


def _multiply_panels(words, thread):  # type: ignore[no-untyped-def]
    element, num_panels, num_threads = words[2], words[3], words[4]
    weight, x, y = words[5], words[6], words[7]
    depth, rows, y_stride, is_added, bias = words[8], words[9], words[10], words[11], words[12]
    size = PANEL * (4 if element == 0 else 2)
    x_stride, apart = depth * 4, depth * size
    # Rows of x that stay in the second cache while a piece's panels pass by.
    block = max(MAX_ROWS, _BLOCK_BYTES // x_stride // MAX_ROWS * MAX_ROWS)
    while True:
        first, count = take(words[0], num_panels, num_threads, thread)
        if count == 0:
            return
        last = first + count
        if bias:
            _begin_with_bias(y, y_stride, bias, rows, first * PANEL, last * PANEL, is_added)
        is_kept = 1 if bias else is_added
        for begin in range(0, rows, block):
            num_rows = min(block, rows - begin)
            from_x, to_y = x + begin * x_stride, y + begin * y_stride
            panel = first
            while panel < last:
                w, to = weight + panel * apart, to_y + panel * PANEL * 4
                width = _num_together(num_rows, last - panel)
                panel += width
                later = w + width * apart if panel < last else _next_weights(words, apart, thread)
                _multiply(
                    width,
                    element,
                    w,
                    size,
                    from_x,
                    x_stride,
                    to,
                    y_stride,
                    depth,
                    num_rows,
                    is_kept,
                    later,
                )


@inner
def _num_together(rows, panels):  # type: ignore[no-untyped-def]
    """Return how many panels meet so many rows at a time."""
    if rows == 1 and panels >= 4:
        return 4
    return 2 if rows <= 2 and panels >= 2 else 1


@inner
def _next_weights(words, apart, thread):  # type: ignore[no-untyped-def]
    """Return where the panels lie that are likely the next: in this matrix or in the one after."""
    first, count = compiled_next_piece(read(words[0]), words[3], words[4], thread)
    return words[5] + first * apart if count else words[13 + thread % 2]


@inner
def _begin_with_bias(y, y_stride, bias, rows, first, last, is_added):  # type: ignore[no-untyped-def]
    """Write the bias to columns [first, last) of y, or add it."""
    values = floats_at(bias)
    for row in range(rows):
        target = floats_at(y + row * y_stride)
        for column in range(first, last):
            target[column] = values[column] + (target[column] if is_added else np.float32(0))


@inner
def _multiply(width, element, w, size, x, x_stride, y, y_stride, depth, rows, is_added, later):  # type: ignore[no-untyped-def]
    """Multiply rows of x with so many panels, and ask for those at `later` meanwhile."""
    apart = depth * size
    if width == 4:
        _product_of_one(
            element, w, size, x, x_stride, y, y_stride, depth, rows, is_added, apart, later, size
        )
    elif width == 2:
        _product_of_two(
            element, w, size, x, x_stride, y, y_stride, depth, rows, is_added, apart, later, size
        )
    else:
        _multiply_rows(
            element, w, size, x, x_stride, y, y_stride, depth, rows, is_added, apart, later
        )


@inner
def _multiply_rows(element, w, size, x, x_stride, y, y_stride, depth, rows, is_added, apart, later):  # type: ignore[no-untyped-def]
    """Multiply rows of x with one panel, in groups of one size or one less."""
    groups = -(-rows // MAX_ROWS)
    # The first two groups ask for half of the next panel each: so memory is busy during both.
    parts = min(groups, 2)
    row = 0
    for group in range(groups):
        count = (rows - row) // (groups - group)
        at, to = x + row * x_stride, y + row * y_stride
        half, each = later + apart // parts * min(group, parts - 1), size // parts
        _product(
            element, w, size, at, x_stride, to, y_stride, depth, count, is_added, apart, half, each
        )
        row += count
