"""Slots of states: found by block and position, given back once, and cut at the ends of blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.contract import Run
from worker.compute.state_slots import StateSlots

TABLE = [7, 3, 5, 1]


def runs(slots: StateSlots, *chunks: tuple[int, int], tables: list[list[int]]) -> list[Run]:
    """Those of a step that computes tokens [first, end) of each sequence."""
    starts = np.cumsum([0, *(end - first for first, end in chunks)], dtype=np.int32)
    ends = np.array([end for _, end in chunks], np.int32)
    return slots.runs(starts, ends, np.array(tables, np.int32))


def test_a_state_has_one_slot_until_it_is_forgotten() -> None:
    slots = StateSlots(3, 4)
    slot = slots.take(TABLE, 6)
    assert slots.take(TABLE, 6) == slot == slots.find(TABLE, 6)
    assert slots.has(3, 6) and not slots.has(3, 5) and not slots.has(7, 6) and 3 in slots
    other = slots.take(TABLE, 8)
    assert other != slot and slots.blocks == {3} and slots.num_free == 1
    slots.forget(3, but=8)
    assert slots.find(TABLE, 8) == other and slots.num_free == 2
    slots.forget(3)
    slots.forget(3)
    assert slots.num_free == 3 and not slots.blocks
    with pytest.raises(ValueError, match="no state after 8 tokens, in block 3"):
        slots.find(TABLE, 8)


def test_a_step_reads_one_slot_and_writes_another() -> None:
    slots = StateSlots(4, 4)
    (begun,) = runs(slots, (0, 3), tables=[TABLE])
    assert (begun.start, begun.stop, begun.before) == (0, 3, None)
    (then,) = runs(slots, (3, 4), tables=[TABLE])
    assert then.before == begun.after != then.after and slots.num_free == 2
    # It was not committed, and is computed again: what it reads is still there.
    assert runs(slots, (3, 4), tables=[TABLE]) == [then]
    (next_block,) = runs(slots, (4, 5), tables=[TABLE])
    assert next_block.before == then.after and slots.has(7, 4), "it may be a snapshot"
    assert slots.num_free == 2, "what was before it is not"


def test_the_state_behind_the_last_full_block_is_kept_if_there_is_a_slot() -> None:
    slots = StateSlots(4, 4)
    first, second, other = runs(slots, (0, 10), (0, 8), tables=[TABLE, [0, 2, 4, 6]])[:3]
    assert (first.start, first.stop, second.start, second.stop) == (0, 8, 8, 10)
    assert first.after == second.before == slots.find(TABLE, 8)
    # Who has the same 8 tokens goes on from the fourth: it has to compute the last.
    assert (other.start, other.stop) == (10, 14) and slots.has(0, 4)
    by_one = StateSlots(4, 4)
    runs(by_one, (0, 3), tables=[TABLE])
    assert [run.stop for run in runs(by_one, (3, 6), tables=[TABLE])] == [1, 3]
    one_left = StateSlots(3, 4)
    assert len(runs(one_left, (0, 10), (0, 8), tables=[TABLE, [0, 2, 4, 6]])) == 3
    assert one_left.num_free == 0
    full = StateSlots(2, 4)
    assert len(runs(full, (0, 10), (0, 8), tables=[TABLE, [0, 2, 4, 6]])) == 2
    assert full.num_free == 0


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(2, 30),
)
def test_runs_cover_the_tokens_and_find_what_they_read(
    block_size: int, counts: list[int], num_slots: int
) -> None:
    slots, table, first = StateSlots(num_slots, block_size), [*range(72, 0, -1)], 0
    last: int | None = None
    for count in counts:
        found = runs(slots, (first, first + count), tables=[table])
        assert found[0].start == 0 and found[-1].stop == count
        for run in found:
            assert run.before == last and run.start < run.stop and run.after != run.before
            last = run.after
        if len(found) == 2:
            border = first + found[0].stop
            assert border % block_size == 0 and count - found[0].stop <= block_size
        first += count
        # As the engine does: nothing is kept but where the sequence is.
        for block in slots.blocks - {table[(first - 1) // block_size]}:
            slots.forget(block)
        slots.forget(table[(first - 1) // block_size], but=first)
        assert slots.num_free == num_slots - 1
