from __future__ import annotations

from random import Random

import pytest

from worker.engine.step_costs import Speed, StepCosts


def learnt(steps: list[tuple[int, int]], *, speed: float = 1.0) -> Speed:
    """Observe steps of 5 ms, 0.1 ms a prompt token and 0.5 ms a sequence."""
    costs = StepCosts()
    for tokens, sequences in steps:
        costs.observe(speed * (5e-3 + 1e-4 * tokens + 5e-4 * sequences), tokens, sequences)
    return costs.speed()


def test_nothing_is_known_before_the_first_step() -> None:
    assert StepCosts().speed() == Speed(None, None, None)


def test_mixed_steps_tell_all_three() -> None:
    draw = Random(1)
    steps = [(draw.choice([0, 0, 512, 2048]), draw.randint(0, 30)) for _ in range(1000)]
    speed = learnt(steps)
    assert speed == pytest.approx((5e-3, 1e-4, 5e-4), rel=0.05)
    assert learnt(steps, speed=3.0) == pytest.approx((1.5e-2, 3e-4, 1.5e-3), rel=0.05)


def test_what_no_step_has_shown_is_unknown() -> None:
    speed = learnt([(0, 1 + i % 20) for i in range(100)])
    assert speed.token_s is None and speed.sequence_s == pytest.approx(5e-4, rel=0.05)
    speed = learnt([(2048, 0)] * 100)
    assert speed.sequence_s is None
    # One size only: the tokens get the whole time, for they are what there will be more of.
    assert speed.token_s == pytest.approx((5e-3 + 0.2048) / 2048, rel=0.01)
    # But a second sequence is expected to add little.
    speed = learnt([(0, 1)] * 100)
    assert speed.sequence_s is not None and speed.sequence_s < 0.1 * 5.5e-3


def test_late_steps_count() -> None:
    costs = StepCosts()
    for seconds in (1e-3, 2e-3):
        for _ in range(1500):
            costs.observe(seconds * 100, 100, 0)
    assert costs.speed().token_s == pytest.approx(2e-3, rel=0.01)


def test_no_figure_is_negative() -> None:
    costs = StepCosts()
    for tokens in (10, 20, 30) * 10:
        costs.observe(1.0 - tokens / 100, tokens, 0)
    assert costs.speed().token_s == 0.0
