from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.flight import Flight
from router.queue import Queue
from router.request import Request
from tests.router.scripted import RecordingSink
from wire.options import Options


def flight(handle: int, priority: int = 0) -> Flight:
    return Flight(
        handle=handle,
        request=Request((1,), Options(priority=priority)),
        sink=RecordingSink(),
        new_tokens=None,
        is_decode_asked=False,
        submitted_at=0.0,
        deadline=1.0,
        due=1.0,
    )


def test_an_empty_queue_holds_no_one_up() -> None:
    queue = Queue()
    assert len(queue) == 0 and queue.first() is None
    assert not queue.is_behind(flight(1))
    queue.remove(flight(1))


def test_a_new_flight_is_behind_its_equals_but_not_behind_lower_ones() -> None:
    queue = Queue()
    queue.add(flight(1, priority=3))
    assert queue.is_behind(flight(2, priority=3)) and queue.is_behind(flight(2, priority=2))
    assert not queue.is_behind(flight(2, priority=4))


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=30))
def test_flights_leave_by_priority_then_in_order(steps: list[tuple[int, bool]]) -> None:
    queue, waiting = Queue(), []
    for handle, (priority, is_removed) in enumerate(steps):
        each = flight(handle, priority)
        queue.add(each)
        if is_removed:
            queue.remove(each)
            queue.remove(each)
        else:
            waiting.append(each)
    for each in sorted(waiting, key=lambda each: (-each.request.options.priority, each.handle)):
        assert queue.first() is each
        queue.remove(each)
    assert len(queue) == 0
