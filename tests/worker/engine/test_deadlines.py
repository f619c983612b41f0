"""Deadlines come out in order, once, and take a bounded memory."""

import tracemalloc

import hypothesis.strategies as st
from hypothesis import given

from wire.options import Options
from worker.engine.deadlines import Deadlines
from worker.engine.sequence import Sequence


def due_in(request_id: int, deadline_ms: int | None) -> Sequence:
    result = Sequence(request_id, [1], Options(deadline_ms=deadline_ms))
    result.arrive(request_id, 0.0)
    return result


def test_a_deadline_set_anew_replaces_the_old() -> None:
    deadlines = Deadlines()
    again = due_in(1, 1000)
    deadlines.add(again)
    deadlines.remove(again)
    again.set_deadline(5.0)
    deadlines.add(again)
    assert deadlines.take_overdue(5.0) == [] and deadlines.next_s == 6.0


def test_ended_sequences_do_not_accumulate() -> None:
    deadlines = Deadlines()
    tracemalloc.start()
    try:
        for request_id in range(10_000):
            short_lived = due_in(request_id, 3_600_000)
            deadlines.add(short_lived)
            deadlines.remove(short_lived)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 100_000


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans(), st.integers(0, 25)), max_size=40))
def test_deadlines_agree_with_a_plain_list(steps: list[tuple[int, bool, int]]) -> None:
    deadlines, plain = Deadlines(), dict[int, Sequence]()
    for request_id, (deadline_s, is_removed, now) in enumerate(steps):
        added = due_in(request_id, 1000 * deadline_s)
        deadlines.add(added)
        plain[request_id] = added
        if is_removed:
            deadlines.remove(plain.pop(request_id))
        times = {i: s.deadline_s for i, s in plain.items() if s.deadline_s is not None}
        due = sorted((i for i in times if times[i] <= now), key=lambda i: (times[i], i))
        assert deadlines.next_s == min(times.values(), default=None)
        assert [s.request_id for s in deadlines.take_overdue(now)] == due
        for other in due:
            del plain[other]
        assert len(deadlines) == len(plain)
