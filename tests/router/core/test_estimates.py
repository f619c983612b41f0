from __future__ import annotations

import pytest

from router.core.estimates import LATEST, Fit, Line, Mean


def test_it_is_the_mean_of_the_first_values() -> None:
    mean = Mean()
    assert mean.value is None
    for value in (1.0, 2.0, 6.0):
        mean.add(value)
    assert mean.value == pytest.approx(3.0)


def test_a_guess_weighs_as_one_value() -> None:
    mean = Mean(10.0)
    mean.add(20.0)
    assert mean.value == pytest.approx(15.0)


def test_a_late_value_still_counts() -> None:
    mean = Mean()
    for _ in range(10_000):
        mean.add(1.0)
    mean.add(2.0)
    assert mean.value == pytest.approx(1.0 + LATEST)


def line_of(pairs: list[tuple[float, float]]) -> Fit | None:
    line = Line()
    for x, y in pairs:
        line.add(x, y)
    return line.fit()


def test_a_line_is_fitted_to_pairs() -> None:
    assert line_of([]) is None
    assert line_of([(x, 2.0 + 0.5 * x) for x in (3, 9, 1, 40) * 8]) == pytest.approx(
        (2.0, 0.5), rel=0.01
    )


def test_equal_pairs_are_on_a_line_through_the_origin() -> None:
    assert line_of([(4.0, 2.0)] * 5) == pytest.approx((0.0, 0.5), abs=1e-9)


@pytest.mark.parametrize("pairs", [[(1.0, 5.0), (2.0, 1.0)], [(1.0, 0.0), (2.0, 10.0)]])
def test_no_part_of_a_line_is_negative(pairs: list[tuple[float, float]]) -> None:
    fit = line_of(pairs)
    assert fit is not None and min(fit) >= 0
