"""Measured costs of engine steps, which routers use to place requests.

A line is fitted by least squares: seconds = step_s + token_s x prompt tokens + sequence_s x
generating sequences.  Recent steps weigh more, so that the costs follow the context length and the
load of the machine.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

# Each step reduces the weight of earlier ones by this factor: to a half after 140 steps.
KEPT: Final = 0.995
# Ridge regression: where all steps are alike, the duration is attributed to the prompt tokens in
# them, but not to the sequences: a worker that has generated one sequence only would seem to get
# too slow for a second one, and so never be given one.
RIDGE: Final = 1e-4
SEQUENCES: Final = 10.0


class Speed(NamedTuple):
    """Duration of a step in seconds, and what each prompt token and each sequence adds."""

    step_s: float | None = None
    token_s: float | None = None
    sequence_s: float | None = None


class StepCosts:
    """Least-squares sums over all steps; only the engine thread may call `observe`."""

    def __init__(self) -> None:
        # Sums of 1, tokens, sequences, their squares and products, and of each times the seconds.
        self._sums = (0.0,) * 9

    def observe(self, seconds: float, num_prompt_tokens: int, num_sequences: int) -> None:
        """Add the duration of one step."""
        n, t, s, tt, ts, ss, y, ty, sy = self._sums
        self._sums = (
            KEPT * n + 1,
            KEPT * t + num_prompt_tokens,
            KEPT * s + num_sequences,
            KEPT * tt + num_prompt_tokens * num_prompt_tokens,
            KEPT * ts + num_prompt_tokens * num_sequences,
            KEPT * ss + num_sequences * num_sequences,
            KEPT * y + seconds,
            KEPT * ty + num_prompt_tokens * seconds,
            KEPT * sy + num_sequences * seconds,
        )

    def speed(self) -> Speed:
        """Return the fitted costs, None where no recent step had any; thread-safe."""
        n, t, s, tt, ts, ss, y, ty, sy = self._sums
        if n < 1:
            return Speed()
        products = np.array([[n, t, s], [t, tt, ts], [s, ts, ss]])
        products += RIDGE * np.diag([n, n, n + SEQUENCES * ss])
        step_s, token_s, sequence_s = np.linalg.solve(products, [y, ty, sy]).clip(0).tolist()
        return Speed(
            step_s=step_s,
            token_s=token_s if tt >= 1 else None,
            sequence_s=sequence_s if ss >= 1 else None,
        )
