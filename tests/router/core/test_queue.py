from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.queue import Queue
from router.core.request import Request
from router.core.state import RequestState
from tests.router.scripted import RecordingSink
from wire.options import Options

PRIORITIES = st.integers(-1, 2)
CLIENTS = st.sampled_from(["a", "b", "c"])


def state(handle: int, priority: int = 0, client: str = "") -> RequestState:
    return RequestState(
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
    assert not queue.is_behind(state(1))
    queue.remove(state(1))


def test_a_new_state_is_behind_its_equals_but_not_behind_lower_ones() -> None:
    queue = Queue()
    queue.add(state(1, priority=3))
    assert queue.is_behind(state(2, priority=3)) and queue.is_behind(state(2, priority=2))
    assert not queue.is_behind(state(2, priority=4))


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=30))
def test_table_leave_by_priority_then_in_order(steps: list[tuple[int, bool]]) -> None:
    queue, waiting = Queue(), []
    for handle, (priority, is_removed) in enumerate(steps):
        each = state(handle, priority)
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
        queue.add(state(handle, client="many"))
    queue.add(state(9, client="one"))
    queue.add(state(8, client="two"))
    assert drain(queue) == [0, 9, 8, 1, 2, 3]


def test_one_that_was_served_before_is_first_of_all() -> None:
    queue = Queue()
    for handle, client in ((1, "a"), (2, "b"), (3, "b")):
        queue.add(state(handle, client=client))
    queue.add_first(state(4, client="b"))
    assert drain(queue) == [4, 1, 2, 3]


def test_the_heaviest_client_gives_way_to_one_with_less() -> None:
    queue = Queue()
    assert queue.displaced_by(state(1), {}) is None
    for handle, priority in ((1, 5), (2, 0), (3, 0), (4, 5)):
        queue.add(state(handle, priority, "many"))
    queue.add(state(5, client="few"))
    displaced = queue.displaced_by(state(6, client="few"), {})
    assert displaced is not None and displaced.handle == 3
    assert queue.displaced_by(state(6, client="many"), {}) is None
    queue.remove(state(3, client="many"))
    for _ in range(2):
        queue.remove(state(2, client="many"))  # Its priority is empty; the other one is not.
    assert queue.displaced_by(state(6, client="few"), {}) is None  # It would have as many.
    displaced = queue.displaced_by(state(6, client="new"), {})
    assert displaced is not None and displaced.handle == 4


class QueueBesideAList(RuleBasedStateMachine):
    """The queue does what a plain list does that is searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()
        self.handles = itertools.count()
        # By priority, the clients in the order of their turns, and the requests of each in order.
        self.lines: list[tuple[int, list[tuple[str, list[RequestState]]]]] = []

    def waiting(self) -> list[RequestState]:
        return [each for _, lines in self.lines for _, line in lines for each in line]

    def take_in(self, each: RequestState, *, first: bool) -> None:
        priority, client = each.request.options.priority, each.request.client
        lines = next((lines for at, lines in self.lines if at == priority), None)
        if lines is None:
            lines = []
            self.lines.append((priority, lines))
            self.lines.sort(key=lambda entry: -entry[0])
        entry = next((entry for entry in lines if entry[0] == client), None)
        if entry is None:
            entry = (client, [])
            lines.append(entry)
        if first:
            entry[1].insert(0, each)
            lines.remove(entry)
            lines.insert(0, entry)
        else:
            entry[1].append(each)

    @rule(priority=PRIORITIES, client=CLIENTS, first=st.booleans())
    def add(self, priority: int, client: str, first: bool) -> None:
        each = state(next(self.handles), priority, client)
        (self.queue.add_first if first else self.queue.add)(each)
        self.take_in(each, first=first)

    @precondition(lambda self: self.lines)
    @rule(at=st.integers(0, 50), times=st.integers(1, 2))
    def remove(self, at: int, times: int) -> None:
        waiting = self.waiting()
        each = waiting[at % len(waiting)]
        for _ in range(times):
            self.queue.remove(each)
        for entry in self.lines:
            for line in entry[1]:
                if each in line[1]:
                    line[1].remove(each)
                    entry[1].remove(line)
                    if line[1]:
                        entry[1].append(line)
        self.lines = [entry for entry in self.lines if entry[1]]

    @rule(priority=PRIORITIES, client=CLIENTS)
    def remove_a_stranger(self, priority: int, client: str) -> None:
        self.queue.remove(state(-1, priority, client))

    @rule(client=CLIENTS, held=st.dictionaries(CLIENTS, st.integers(1, 3)))
    def displace(self, client: str, held: dict[str, int]) -> None:
        counts = Counter(each.request.client for each in self.waiting())
        displaced = self.queue.displaced_by(state(-1, client=client), held)
        for each in held:  # Counts only for who has a place in the queue to give.
            counts[each] += held[each] if counts[each] or each == client else 0
        most = max((counts[each.request.client] for each in self.waiting()), default=0)
        if counts[client] + 1 >= most:
            assert displaced is None
            return
        assert displaced is not None
        heaviest = displaced.request.client
        assert counts[heaviest] == most
        theirs = [each for each in self.waiting() if each.request.client == heaviest]
        lowest = min(each.request.options.priority for each in theirs)
        assert displaced is [e for e in theirs if e.request.options.priority == lowest][-1]

    @rule(priority=PRIORITIES)
    def look(self, priority: int) -> None:
        behind = any(each.request.options.priority >= priority for each in self.waiting())
        assert self.queue.is_behind(state(-1, priority)) is behind

    @invariant()
    def agree(self) -> None:
        waiting = self.waiting()
        assert len(self.queue) == len(waiting)
        assert self.queue.first() is (waiting[0] if waiting else None)


TestQueueBesideAList = QueueBesideAList.TestCase
TestQueueBesideAList.settings = settings(max_examples=40, stateful_step_count=25)
