"""What is counted of an executor's steps: how many, how long, how many tokens.

One thread writes, any thread reads: what readers copy is replaced or appended to in one operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Percentiles are of so many latest steps: enough for a p95, cheap to sort when somebody asks.
WINDOW: Final = 1024


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of one kind of step; the percentiles are of the latest `WINDOW`."""

    num_steps: int
    mean_s: float
    p50_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """An executor's life so far (seed 003).

    Attributes:
        prefill: Steps that read prompts, alone or beside generation.
        decode: Steps that only generate.
        tokens_per_second: Sampled tokens over the time of all steps.
        mean_batch_sequences: Sequences of a step.
    """

    prefill: Latency
    decode: Latency
    tokens_per_second: float
    mean_batch_sequences: float

    @property
    def num_steps(self) -> int:
        return self.prefill.num_steps + self.decode.num_steps


class Stopwatch:
    """Times of one kind of step."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.total_s = 0.0
        self._latest: list[float] = []

    def add(self, seconds: float) -> None:
        if len(self._latest) < WINDOW:
            self._latest.append(seconds)
        else:
            self._latest[self.num_steps % WINDOW] = seconds
        self.total_s += seconds
        self.num_steps += 1

    def latency(self) -> Latency:
        latest = sorted(self._latest)
        mean_s = self.total_s / self.num_steps if self.num_steps else 0.0
        return Latency(self.num_steps, mean_s, _percentile(latest, 50), _percentile(latest, 95))


def _percentile(ordered: list[float], percent: int) -> float:
    """The least value that `percent` of them do not exceed; 0 of none."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else 0.0
