"""Slot numbers stay with their sequence; the view adds up."""

from wire.options import Options
from worker.engine.sequence import Sequence
from worker.engine.slots import Slot, SlotNumbers, Slots, SlotState


def test_the_lowest_free_number_is_taken() -> None:
    numbers = SlotNumbers()
    assert [numbers.take() for _ in range(4)] == [0, 1, 2, 3]
    numbers.give_back(2)
    numbers.give_back(0)
    assert [numbers.take() for _ in range(3)] == [0, 2, 4]


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
    assert [slot.number for slot in slots.generating] == [2]
    assert (slots.num_idle, slots.utilization, slots.tokens_per_second) == (2, 0.5, 2.0)


def test_who_stops_while_the_view_is_taken_is_not_in_it() -> None:
    stopped = running(1, 9, 4)
    stopped.slot = None
    slots = Slots.of([running(0, 9, 4), stopped], 4, now=3.0)
    assert [slot.number for slot in slots.active] == [0]


def test_no_slot_in_use() -> None:
    slots = Slots.of([], 4, now=3.0)
    assert (slots.num_idle, slots.utilization, slots.tokens_per_second) == (4, 0.0, 0.0)


def test_more_than_all_is_all() -> None:
    """Reservations that begin to decode may exceed the limit of a step."""
    slots = Slots.of([running(slot, 9, 4) for slot in range(3)], 2, now=3.0)
    assert (slots.num_idle, slots.utilization) == (0, 1.0)
