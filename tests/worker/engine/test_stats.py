"""The figures of an engine that did a little of everything."""

import pytest

from tests.worker.engine.hashed import GREEDY, engine_of, run
from wire.options import Options
from worker.engine.sequence import Sequence
from worker.engine.stats import Counters, Stats


def test_counters_say_what_happened() -> None:
    engine = engine_of(num_blocks=32, max_ubatch_tokens=8)
    engine.add(Sequence(1, range(12), GREEDY, 3))
    run(engine)
    engine.add(Sequence(2, range(12), GREEDY, 3))
    engine.add(Sequence(3, []))
    engine.add(Sequence(4, [5] * 4, GREEDY, 30))
    engine.step()
    engine.cancel(4)
    run(engine)
    counters = engine.stats().counters
    assert (counters.started, counters.finished, counters.failed, counters.cancelled) == (
        3,
        2,
        1,
        1,
    )
    assert (counters.prefill_tokens, counters.cached_tokens) == (12 + 4 + 4, 8)
    assert counters.decode_tokens == 7 and counters.steps == engine.steps
    assert counters.forward_s > 0 and counters.overhead_s > 0
    assert engine.stats().prefix_hit_rate == pytest.approx(8 / 28)
    assert engine.stats().overhead_ms > 0


def test_a_snapshot_does_not_move() -> None:
    engine = engine_of(num_blocks=32)
    before = engine.stats()
    engine.add(Sequence(1, range(12), Options(), 3))
    assert engine.stats().num_waiting == 1
    engine.step()
    after = engine.stats()
    assert (before.num_running, before.counters.steps) == (0, 0)
    assert (after.num_running, after.num_waiting, after.counters.steps) == (1, 0, 1)
    assert after.blocks_used + after.blocks_free + after.blocks_cached == after.blocks_total == 32
    assert after.blocks_used == 3 and after.max_running == 256


def test_rates_of_nothing_are_zero() -> None:
    stats = engine_of().stats()
    assert (stats.acceptance_rate, stats.prefix_hit_rate, stats.overhead_ms) == (0.0, 0.0, 0.0)


def test_everything_flat() -> None:
    figures = engine_of().stats().as_dict()
    assert figures.keys() >= set(Counters.__slots__) - {"step_counts"}
    assert figures.keys() >= set(Stats.__slots__) - {"counters"}
    assert all(isinstance(figure, int | float) for figure in figures.values())
