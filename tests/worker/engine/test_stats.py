"""The figures of an engine that did a little of everything, and the view of its slots."""

from tests.worker.engine.hashed import GREEDY, engine_of, run
from wire.options import Options
from worker.engine.sequence import Sequence
from worker.engine.stats import Slot, Slots, SlotState


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


def running(slot: int, num_computed: int, num_new: int) -> Sequence:
    sequence = Sequence(10 + slot, [1] * 6, Options())
    sequence.token_ids += [2] * num_new
    sequence.num_computed_tokens = num_computed
    sequence.started_s, sequence.slot = 1.0, slot
    return sequence


def test_the_view_says_what_each_slot_does() -> None:
    slots = Slots.of([running(2, 9, 4), running(0, 3, 0)], 4, now=3.0)
    assert slots.active == (
        Slot(0, 10, SlotState.PROCESSING, 6, 3, 0, 0.0),
        Slot(2, 12, SlotState.GENERATING, 10, 9, 4, 2.0),
    )
    assert (slots.utilization, slots.tokens_per_second) == (0.5, 2.0)
    assert Slots.of([running(2, 9, 4)], 4, now=1.0).tokens_per_second == 0.0
