"""A key holds what it may, or the error names it."""

from __future__ import annotations

import pytest

from wire.process.model import ModelError
from worker.model.keys import count, flag, positive


def test_counts() -> None:
    assert count({"n": 3}, "n") == count({}, "n", 3) == count({"n": None}, "n", 3) == 3
    assert count({"n": 0}, "n", minimum=0) == 0
    with pytest.raises(ModelError, match=r"n is missing"):
        count({"n": None}, "n")
    for wrong in (0, 1.0, True, "3", [3]):
        with pytest.raises(ModelError, match=r"n is .*, not an integer of at least 1"):
            count({"n": wrong}, "n", 3)


def test_flags() -> None:
    assert flag({"on": True}, "on") and flag({}, "on", default=True) and not flag({}, "on")
    for wrong in (1, "true", None):
        with pytest.raises(ModelError, match=r"on is .*, not true or false"):
            flag({"on": wrong}, "on")


def test_positive_numbers() -> None:
    assert positive({"x": 2}, "x") == positive({"x": None}, "x", 2.0) == 2.0
    for wrong in (0, -1.5, True, "2", None, float("nan"), float("inf")):
        with pytest.raises(ModelError, match=r"x is .*, not a positive number"):
            positive({"x": wrong}, "x")
