"""A drift of the machine cancels; a change of one side shows."""

from __future__ import annotations

import random

import pytest

from scripts.bench.pairs import Pairs


def drifting(slower: float, *, num_blocks: int = 40, num: int = 100) -> Pairs:
    """Samples on a machine whose speed changes twofold each second; the tried side is slower."""
    draw, pairs = random.Random(1), Pairs()
    for block in range(0, 2 * num_blocks, 2):
        speed = draw.uniform(1, 2)
        for _ in range(num):
            pairs.add(block, speed * draw.uniform(1, 3) * slower, is_tried=True)
            pairs.add(block, speed * draw.uniform(1, 3), is_tried=False)
    return pairs


def test_equal_sides_have_a_ratio_of_one_in_spite_of_the_drift() -> None:
    ratio = drifting(1.0).ratio(0.99)
    assert ratio.low < 1 < ratio.high
    assert ratio.value == pytest.approx(1, abs=0.05) and ratio.high - ratio.low < 0.1


def test_a_slower_side_shows() -> None:
    for share in (0.5, 0.99):
        ratio = drifting(1.3).ratio(share)
        assert ratio.low < ratio.value < ratio.high
        assert ratio.value == pytest.approx(1.3, abs=0.08) and ratio.low > 1.1


def test_a_stall_of_one_in_fifty_is_in_the_p99_only() -> None:
    pairs = drifting(1.0)
    for block in range(0, 80, 2):
        for _ in range(3):
            pairs.add(block, 60.0, is_tried=True)
    assert pairs.ratio(0.99).low > 5
    assert pairs.ratio(0.5).value == pytest.approx(1, abs=0.1)


def test_pairs_are_put_together_and_counted() -> None:
    one, other = Pairs(), Pairs()
    one.add(0.2, 1.0, is_tried=True)
    one.add(0.3, 1.0, is_tried=False)
    other.add(0.4, 3.0, is_tried=True)
    one.add_all(other)
    assert one.size == 1
    assert (one.ratio(0.5).tried_s, one.ratio(0.99).tried_s, one.ratio(0.5).calm_s) == (1, 3, 1)
    assert "1 samples a side" in one.summary()


def test_a_second_in_which_only_one_side_has_samples_does_not_count() -> None:
    pairs = drifting(1.0)
    before = pairs.ratio(0.99).value
    pairs.add(1000.0, 60.0, is_tried=True)
    assert pairs.ratio(0.99).value == before
