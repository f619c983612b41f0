"""y = x W^T on the CPU, for one row or thousands, from weights kept in 16 bits.

Strategy: W is packed into panels of 16 output columns, one element of each for every input in turn
(`[N / 16, K, 16]`), so that a panel is read front to back while six rows of x meet it in registers.
A panel stays in the first cache over all rows: memory moves each weight once a call.  x and y are
float32 and so is every product: a bfloat16 weight is widened exactly, on the way to the register.
Nothing here rounds to 16 bits, so the result is that of float32 weights at half the bytes.  A row's
sums are taken in one order: who shares the batch changes no bit of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from kernels.scalars import fetch_add
from kernels.simd import PANEL, panel_product
from kernels.team import compiled, inner, run

# Rows whose sums fit the registers beside a panel's two vectors.
MAX_ROWS = 6
# Fewer multiplications than this are done before another thread would have woken up.
_ALONE = 1 << 16
_BLOCK_BYTES = 1 << 18
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_float32_product = panel_product("float32", MAX_ROWS)
_bfloat16_product = panel_product("bfloat16", MAX_ROWS)
_float16_product = panel_product("float16", MAX_ROWS)


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
        return weight.shape[1] > 0 and weight.dtype in _ELEMENTS

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the matrix, [len(indices), K]; what an embedding looks up."""
        panel = torch.div(indices, PANEL, rounding_mode="floor")
        return self.panels[panel, :, indices % PANEL]


def linear(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T, or add it to `out` and return that.

    Args:
        x: [T, K] float32, rows contiguous.
        out: [T, N] float32, contiguous.
    """
    rows, columns = weight.shape
    num_panels = weight.panels.shape[0]
    target = out
    if target is None or rows % PANEL:
        target = torch.empty(x.shape[0], num_panels * PANEL)
    if x.shape[0]:
        x = x.contiguous()
        words = [
            _ELEMENTS[weight.panels.dtype],
            num_panels,
            # Pieces large enough to be worth taking, small enough to share evenly.
            max(1, min(8, num_panels // 16)),
            weight.panels.data_ptr(),
            x.data_ptr(),
            target.data_ptr(),
            columns,
            x.shape[0],
            target.shape[1] * 4,
            int(target is out),
        ]
        alone = x.shape[0] * rows * columns < _ALONE
        run(task(), words, int(alone))
    if rows % PANEL:
        target = target[:, :rows]
    if out is None:
        return target
    return out if target is out else out.add_(target)


@cache
def task() -> Any:
    """Return the compiled loop."""
    return compiled(_multiply_panels)


def _multiply_panels(words):  # type: ignore[no-untyped-def]
    element, num_panels, step = words[2], words[3], words[4]
    weight, x, y = words[5], words[6], words[7]
    depth, rows, y_stride, is_added = words[8], words[9], words[10], words[11]
    w_stride = PANEL * (4 if element == 0 else 2)
    x_stride = depth * 4
    # Rows of x that stay in the second cache while a piece's panels pass by.
    block = max(MAX_ROWS, _BLOCK_BYTES // x_stride // MAX_ROWS * MAX_ROWS)
    while True:
        first = fetch_add(words[0], step)
        if first >= num_panels:
            return
        last = min(first + step, num_panels)
        for begin in range(0, rows, block):
            end = min(begin + block, rows)
            for panel in range(first, last):
                w = weight + panel * depth * w_stride
                to = y + panel * PANEL * 4
                _multiply_rows(
                    element, w, w_stride, x, x_stride, to, y_stride, depth, begin, end, is_added
                )


@inner
def _multiply_rows(  # type: ignore[no-untyped-def]
    element, w, w_stride, x, x_stride, y, y_stride, depth, begin, end, is_added
):
    """Multiply rows [begin, end) of x with one panel."""
    for row in range(begin, end, MAX_ROWS):
        left, at, to = end - row, x + row * x_stride, y + row * y_stride
        if element == 1:
            _bfloat16_product(w, w_stride, at, x_stride, to, y_stride, depth, left, is_added)
        elif element == 0:
            _float32_product(w, w_stride, at, x_stride, to, y_stride, depth, left, is_added)
        else:
            _float16_product(w, w_stride, at, x_stride, to, y_stride, depth, left, is_added)
