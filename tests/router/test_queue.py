from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.flight import Flight
from router.queue import Queue
from router.request import Request
from tests.router.scripted import RecordingSink
from wire.options import Options


def flight(handle: int, priority: int = 0, client: str = "") -> Flight:
    return Flight(
        handle=handle,
        request=Request((1,), Options(priority=priority), client=client),
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


def drain(queue: Queue) -> list[int]:
    handles = []
    while (each := queue.first()) is not None:
        handles.append(each.handle)
        queue.remove(each)
    return handles


def test_clients_take_turns() -> None:
    queue = Queue()
    for handle in range(4):
        queue.add(flight(handle, client="many"))
    queue.add(flight(9, client="one"))
    queue.add(flight(8, client="two"))
    assert drain(queue) == [0, 9, 8, 1, 2, 3]


def test_one_that_was_served_before_is_first_of_all() -> None:
    queue = Queue()
    for handle, client in ((1, "a"), (2, "b"), (3, "b")):
        queue.add(flight(handle, client=client))
    queue.add_first(flight(4, client="b"))
    assert drain(queue) == [4, 1, 2, 3]


def test_the_heaviest_client_gives_way_to_one_with_less() -> None:
    queue = Queue()
    assert queue.displaced_by(flight(1)) is None
    for handle, priority in ((1, 5), (2, 0), (3, 0), (4, 5)):
        queue.add(flight(handle, priority, "many"))
    queue.add(flight(5, client="few"))
    displaced = queue.displaced_by(flight(6, client="few"))
    assert displaced is not None and displaced.handle == 3
    assert queue.displaced_by(flight(6, client="many")) is None
    queue.remove(flight(3, client="many"))
    queue.remove(flight(2, client="many"))
    assert queue.displaced_by(flight(6, client="few")) is None  # It would have as many.
