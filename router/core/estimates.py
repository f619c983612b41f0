"""Estimates from a stream of measurements: a running mean, and a line through pairs."""

from __future__ import annotations

from typing import Final, NamedTuple

# The weight of the latest value, once there are many.
LATEST: Final = 1 / 32
# How strongly a line is drawn to the origin: it decides only where all pairs are alike.
RIDGE: Final = 1e-3


class Mean:
    """An exponential moving average that starts as the plain mean.

    Attributes:
        value: None before the first value, unless a guess is given, which counts as one value.
    """

    def __init__(self, guess: float | None = None) -> None:
        self.value = guess
        self._num = 0 if guess is None else 1

    def add(self, value: float) -> None:
        self._num += 1
        known = value if self.value is None else self.value
        self.value = known + (value - known) * max(1 / self._num, LATEST)


class Fit(NamedTuple):
    """A line: y = `base` + `slope` * x, neither below 0."""

    base: float
    slope: float


class Line:
    """Fits a line to pairs by least squares; each new pair reduces the weight of earlier ones."""

    def __init__(self) -> None:
        self._num = 0.0
        self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a pair; `x` must be above 0."""
        kept = 1 - LATEST
        self._num = kept * self._num + 1
        self._x, self._y = kept * self._x + x, kept * self._y + y
        self._xx, self._xy = kept * self._xx + x * x, kept * self._xy + x * y

    def fit(self) -> Fit | None:
        """Return the line, through the origin where all pairs are alike; None before a pair."""
        if not self._num:
            return None
        num = self._num * (1 + RIDGE)
        slope = (num * self._xy - self._x * self._y) / (num * self._xx - self._x * self._x)
        base = (self._y - slope * self._x) / num
        if slope < 0:
            return Fit(self._y / self._num, 0.0)
        return Fit(base, slope) if base >= 0 else Fit(0.0, self._xy / self._xx)
