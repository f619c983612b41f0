"""The lowest free number is taken, so that numbers stay small."""

from worker.engine.slot_numbers import SlotNumbers


def test_the_lowest_free_number_is_taken() -> None:
    slots = SlotNumbers()
    assert [slots.take() for _ in range(4)] == [0, 1, 2, 3]
    for number in (2, 0):
        slots.give_back(number)
    assert [slots.take() for _ in range(3)] == [0, 2, 4]
