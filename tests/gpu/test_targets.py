"""Ratios against targets, and what cannot be one."""

import math

import pytest

from tests.gpu.targets import TARGETS, Reached, Target, judge
from tests.gpu.trail import Figures

DECODE = Target("decode", "attend", "decode_gbs", "copy_gbs", 0.80, 0.95)


@pytest.mark.parametrize(
    ("measured", "reached"),
    [
        (799.0, Reached.MISSED),
        (800.0, Reached.TARGET),
        (949.0, Reached.TARGET),
        (950.0, Reached.STRETCH),
    ],
)
def test_a_ratio_is_judged_at_its_borders(measured: float, reached: Reached) -> None:
    verdict = judge(DECODE, {"decode_gbs": measured, "copy_gbs": 1000.0})
    assert verdict.ratio == measured / 1000 and verdict.reached is reached


def test_a_row_with_one_border_only() -> None:
    figures: Figures = {"decode_gbs": 85.0, "copy_gbs": 100.0}
    assert judge(DECODE._replace(stretch=None), figures).reached is Reached.TARGET
    assert judge(DECODE._replace(target=None), figures).reached is Reached.SHORT
    assert judge(DECODE._replace(target=None, stretch=0.8), figures).reached is Reached.STRETCH


@pytest.mark.parametrize("bad", [None, 0.0, -1.0, math.nan, math.inf, "fast"])
@pytest.mark.parametrize("name", ["decode_gbs", "copy_gbs"])
def test_what_is_no_figure_was_not_measured(bad: float | str | None, name: str) -> None:
    figures: Figures = {"decode_gbs": 90.0, "copy_gbs": 100.0}
    del figures[name]
    if bad is not None:
        figures[name] = bad
    assert judge(DECODE, figures) == (DECODE, None, Reached.UNKNOWN)


def test_a_stretch_is_beyond_its_target() -> None:
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    for it in TARGETS:
        assert it.target is not None or it.stretch is not None
        assert it.target is None or it.stretch is None or it.target < it.stretch
