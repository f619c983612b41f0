"""Compares two variants that are measured at the same time, so that noise affects both.

The speed of a shared machine varies more than the effects to measure, so measuring one variant
after the other mostly compares the other load.  Here both run at once and each sample has a time.
The confidence interval for a ratio of quantiles is from a bootstrap over blocks of two seconds,
because samples taken at the same time are not independent.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

BLOCK_S: Final = 2.0
RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95

Samples = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Ratio:
    """The ratio of a quantile of both variants; `low` to `high` is the confidence interval."""

    tried_s: float
    calm_s: float
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.tried_s / self.calm_s

    def __str__(self) -> str:
        return (
            f"{self.tried_s * 1e3:6.2f} over {self.calm_s * 1e3:6.2f} ms = {self.value:.3f} "
            f"[{self.low:.3f} .. {self.high:.3f}]"
        )


class Pairs:
    """Samples of two variants: with (`tried`) and without (`calm`) the effect to measure."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))

    def add(self, at: float, seconds: float, *, is_tried: bool) -> None:
        """Add a sample of `seconds`, taken at the time `at` of the monotonic clock."""
        self._blocks[int(at // BLOCK_S)][0 if is_tried else 1].append(seconds)

    def add_all(self, other: Pairs) -> None:
        """Add the samples of another object, taken at the same or at other times."""
        for key, sides in other._blocks.items():
            for mine, theirs in zip(self._blocks[key], sides, strict=True):
                mine += theirs

    @property
    def size(self) -> int:
        """The number of samples of the variant that has fewer."""
        return min(sum(map(len, side)) for side in self._sides())

    def ratio(self, share: float) -> Ratio:
        """Compare a quantile of both variants."""
        tried, calm = self._sides()
        num = len(tried)
        drawn = np.random.default_rng(1).multinomial(num, np.full(num, 1 / num), RESAMPLES)
        counts = np.vstack((np.ones(num, np.int64), drawn))  # the first row is not resampled
        tried_s, calm_s = (_quantiles(side, counts, share) for side in (tried, calm))
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(tried_s[1:] / calm_s[1:], (tail, 1 - tail))
        return Ratio(float(tried_s[0]), float(calm_s[0]), float(low), float(high))

    def summary(self) -> str:
        """Return one line: the ratios of p50 and p99, and the numbers of samples."""
        return (
            f"p50 {self.ratio(0.5)}  p99 {self.ratio(0.99)}  "
            f"{self.size} samples a side, {self.size // 100} above the p99"
        )

    def _sides(self) -> tuple[list[list[float]], list[list[float]]]:
        """Return the blocks of both variants, from the times at which both have samples."""
        shared = [sides for sides in self._blocks.values() if all(sides)]
        return [tried for tried, _ in shared], [calm for _, calm in shared]


def _quantiles(blocks: list[list[float]], counts: Counts, share: float) -> Samples:
    """Return the quantile for each row of `counts`, the number of times to count each block."""
    samples = np.concatenate(blocks)
    owner = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
    order = np.argsort(samples)
    samples, owner = samples[order], owner[order]
    quantiles = np.empty(len(counts))
    for index, row in enumerate(counts):
        ranks = np.cumsum(row[owner])
        quantiles[index] = samples[np.searchsorted(ranks, share * ranks[-1])]
    return quantiles
