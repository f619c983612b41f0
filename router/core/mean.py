"""A running mean, for what the router measures of its workers and requests."""

from __future__ import annotations

from typing import Final

# The weight of the latest of many values.
LATEST: Final = 1 / 32


class Mean:
    """The mean of the values so far, in which late ones weigh more than early ones.

    Attributes:
        value: None before the first, unless there is a guess; it weighs as one value.
    """

    def __init__(self, guess: float | None = None) -> None:
        self.value = guess
        self._num = 0 if guess is None else 1

    def add(self, value: float) -> None:
        """Add a value."""
        self._num += 1
        known = value if self.value is None else self.value
        self.value = known + (value - known) * max(1 / self._num, LATEST)
