from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.queue import Queue
from router.core.request import Request
from router.core.state import RequestState
from tests.router.core import states
from wire.options import Options

TIMEOUT_S = 30.0
PRIORITIES = st.sampled_from([-100, -1, 0, 1, 100])
CLIENTS = st.sampled_from(["a", "b", "c"])


def state(
    handle: int, priority: int = 0, client: str = "", submitted_at: float = 0.0
) -> RequestState:
    request = Request((1,), Options(priority=priority), client=client)
    return states.state(request, handle=handle, submitted_at=submitted_at)


def drain(queue: Queue) -> list[int]:
    handles = []
    while (each := queue.first()) is not None:
        handles.append(each.handle)
        queue.take(each, 0.0)
    return handles


@pytest.mark.parametrize(
    ("low", "high", "head_start_s"), [(-100, 100, 15.0), (-100, 0, 7.5), (0, 1, 0.75), (-1, 1, 1.5)]
)
def test_a_lower_priority_is_first_once_it_has_waited_longer_by_the_head_start(
    low: int, high: int, head_start_s: float
) -> None:
    queue = Queue(TIMEOUT_S)
    queue.add(state(1, low))
    assert not queue.is_behind(state(2, high, submitted_at=head_start_s - 0.01))
    more = state(
        3, low, submitted_at=head_start_s
    )  # It does not begin the wait of its client anew.
    queue.add(more)
    late = state(4, high, submitted_at=head_start_s + 0.01)
    assert queue.is_behind(late)
    queue.add(late)
    queue.remove(more)
    assert drain(queue) == [1, 4]


def test_old_requests_of_one_client_do_not_pass_higher_priorities() -> None:
    """A thousand requests of low priority, however old, do not keep a higher one waiting."""
    queue = Queue(TIMEOUT_S)
    for handle in range(1000):
        queue.add(state(handle, -100, "many"))
    for turn in range(10):
        now = 20.0 + turn
        each = state(1000 + turn, 100, "few", now)
        queue.add(each)
        first = queue.first()
        assert first is not None
        if turn == 0:  # that of the client that has waited for its turn since the beginning
            assert first.handle == 0
            queue.take(first, now)
            first = queue.first()
        assert first is each
        queue.take(each, now)


class Line:
    """The requests of one client and priority; since when it waits for its turn."""

    def __init__(self, each: RequestState) -> None:
        self.priority, self.client = each.request.options.priority, each.request.client
        self.since = each.submitted_at
        self.waiting: list[RequestState] = []

    @property
    def order(self) -> tuple[float, int]:
        part = (abs(self.priority) / 100) ** 0.5 * (1 if self.priority > 0 else -1)
        return self.since - part * TIMEOUT_S / 4, -self.priority


class QueueBesideAList(RuleBasedStateMachine):
    """The queue does what plain lists do that are searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(TIMEOUT_S)
        self.handles = itertools.count()
        self.now = 0.0
        # In the order of their turns, among those of one priority.
        self.lines: list[Line] = []

    def waiting(self) -> list[RequestState]:
        return [each for line in self.lines for each in line.waiting]

    def new(self, priority: int, client: str) -> RequestState:
        return state(next(self.handles), priority, client, self.now)

    def line_of(self, each: RequestState) -> Line | None:
        wanted = each.request.options.priority, each.request.client
        return next((it for it in self.lines if (it.priority, it.client) == wanted), None)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(priority=PRIORITIES, client=CLIENTS, first=st.booleans())
    def add(self, priority: int, client: str, first: bool) -> None:
        each = self.new(priority, client)
        (self.queue.add_first if first else self.queue.add)(each)
        line = self.line_of(each)
        if line is None:
            self.lines.append(line := Line(each))
        if first:
            self.lines.remove(line)
            others = [it.since for it in self.lines if it.priority == priority]
            line.since = min([*others, line.since])
            self.lines.insert(0, line)
            line.waiting.insert(0, each)
        else:
            line.waiting.append(each)

    def take_out(self, line: Line, each: RequestState) -> None:
        line.waiting.remove(each)
        if not line.waiting:
            self.lines.remove(line)

    @precondition(lambda self: self.lines)
    @rule(at=st.integers(0, 50), times=st.integers(1, 2))
    def remove(self, at: int, times: int) -> None:
        each = self.waiting()[at % len(self.waiting())]
        for _ in range(times):
            self.queue.remove(each)
        line = self.line_of(each)
        assert line is not None
        self.take_out(line, each)

    @precondition(lambda self: self.lines)
    @rule()
    def take(self) -> None:
        line = min(self.lines, key=lambda it: it.order)
        each = line.waiting[0]
        self.queue.take(each, self.now)
        self.lines.remove(line)
        self.lines.append(line)
        line.since = self.now
        self.take_out(line, each)

    @rule(priority=PRIORITIES, client=CLIENTS)
    def remove_a_stranger(self, priority: int, client: str) -> None:
        self.queue.remove(self.new(priority, client))

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
        theirs = [line for line in self.lines if line.client == heaviest]
        assert displaced is min(theirs, key=lambda line: line.priority).waiting[-1]

    @rule(priority=PRIORITIES)
    def look(self, priority: int) -> None:
        new = Line(self.new(priority, "new"))
        behind = any(line.order <= new.order for line in self.lines)
        assert self.queue.is_behind(self.new(priority, "new")) is behind

    @invariant()
    def agree(self) -> None:
        assert len(self.queue) == len(self.waiting())
        first = min(self.lines, key=lambda line: line.order, default=None)
        assert self.queue.first() is (first.waiting[0] if first else None)


TestQueueBesideAList = QueueBesideAList.TestCase
TestQueueBesideAList.settings = settings(max_examples=40, stateful_step_count=25)
