from __future__ import annotations

import pytest

from router.core.mean import LATEST, Mean


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
