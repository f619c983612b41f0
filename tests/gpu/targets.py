"""Targets of the kernels: ratios of two figures that were measured in the same run."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

from tests.gpu.trail import Figures


class Reached(StrEnum):
    """How a ratio stands to its target."""

    STRETCH = "stretch"
    TARGET = "target"
    MISSED = "missed"
    SHORT = "below the stretch"  # and there is no target
    UNKNOWN = "not measured"


class Target(NamedTuple):
    """A row of the table: `measured` over `limit`, names of figures.

    Attributes:
        kernel: whose row it is.
        target: the ratio to reach; None if there is only a stretch.
        stretch: the ratio that would be better still; None if there is none.
    """

    name: str
    kernel: str
    measured: str
    limit: str
    target: float | None
    stretch: float | None


class Verdict(NamedTuple):
    """A target and what was measured; `ratio` is None where one of the figures is not there."""

    target: Target
    ratio: float | None
    reached: Reached


TARGETS = (
    Target("decode, KV of 1 GB / copy", "attend", "decode_long_gbs", "copy_gbs", 0.80, 0.95),
    Target("decode, 16 x 1k, GQA 8 / copy", "attend", "decode_short_gbs", "copy_gbs", 0.60, 0.75),
    Target("prefill 8k / SDPA flash", "attend", "prefill_8k_tflops", "flash_8k_tflops", 0.90, None),
    Target(
        "prefill 16k / SDPA flash", "attend", "prefill_16k_tflops", "flash_16k_tflops", 0.90, None
    ),
    Target(
        "prefill 16k / SDPA cuDNN", "attend", "prefill_16k_tflops", "cudnn_16k_tflops", None, 0.90
    ),
    *(
        Target(
            f"prefill {kilo}k on Hopper / SDPA cuDNN",
            "attend_wide",
            f"prefill_wide_{kilo}k_tflops",
            f"cudnn_{kilo}k_tflops",
            0.80,
            0.95,
        )
        for kilo in (8, 16)
    ),
    Target("heads of 16k tokens / copy", "rotate_and_append", "heads_gbs", "copy_gbs", 0.80, 0.90),
    Target("pack on the device / copy", "move", "pack_gbs", "copy_gbs", 0.85, 0.95),
    Target("unpack on the device / copy", "move", "unpack_gbs", "copy_gbs", 0.85, 0.95),
    Target("KV between workers / copy", "copy_pieces", "lent_gbs", "copy_gbs", 0.50, None),
    Target("pack to pinned, staged / DMA", "move", "pack_pinned_gbs", "d2h_gbs", 0.93, 0.97),
    *(
        Target(
            f"graph, {name}, {number} / read",
            "step",
            f"graph_{name}_{number}_gbs",
            "read_gbs",
            0.74,
            0.9,
        )
        for name in ("1b", "7b")
        for number in (1, 8, 32)
    ),
    *(
        Target(
            f"graph / step, {name}, {number}",
            "step",
            f"graph_{name}_{number}_ms",
            f"step_{name}_{number}_ms",
            0.91,
            None,
        )
        for name in ("1b", "7b")
        for number in (1, 8, 32, 128)
    ),
    *(
        Target(
            f"greedy + 0.15 ms / drawn, {name}",
            "step",
            f"drawn_{name}_allowed_ms",
            f"drawn_{name}_ms",
            1.0,
            None,
        )
        for name in ("1b", "7b")
    ),
    *(
        Target(
            f"busy / prompt of 2048, {name}",
            "step",
            f"prompt_{name}_busy_ms",
            f"prompt_{name}_ms",
            0.91,
            None,
        )
        for name in ("1b", "7b")
    ),
)


def judge(target: Target, figures: Figures) -> Verdict:
    """Compare what was measured with what is wanted; what is no number was not measured."""
    measured, limit = figures.get(target.measured), figures.get(target.limit)
    if not (_is_figure(measured) and _is_figure(limit)):
        return Verdict(target, None, Reached.UNKNOWN)
    ratio = float(measured or 0) / float(limit or 0)
    if target.stretch is not None and ratio >= target.stretch:
        return Verdict(target, ratio, Reached.STRETCH)
    if target.target is None:
        return Verdict(target, ratio, Reached.SHORT)
    if ratio >= target.target:
        return Verdict(target, ratio, Reached.TARGET)
    return Verdict(target, ratio, Reached.MISSED)


def _is_figure(value: float | str | None) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
