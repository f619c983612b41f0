"""A running mean, for measurements of workers and requests."""

from __future__ import annotations

from typing import Final

# The weight of the latest value, once there are many.
LATEST: Final = 1 / 32


class Mean:
    """An exponential moving average that starts as the plain mean.

    Attributes:
        value: None before the first value, unless a guess is given, which counts as one value.
    """

    def __init__(self, guess: float | None = None) -> None:
        self.value = guess
        self._num = 0 if guess is None else 1

    def add(self, value: float) -> None:
        """Add a value."""
        self._num += 1
        known = value if self.value is None else self.value
        self.value = known + (value - known) * max(1 / self._num, LATEST)
