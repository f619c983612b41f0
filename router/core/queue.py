"""The queue of requests without a worker: by priority and age, with clients in turn.

Each priority has a fair queue of clients (`wire.process.fair_queue`).  While the first request
finds no worker with room, all others wait, or short prompts would always pass a long one.

No priority starves.  The higher of two priorities is first unless the next client of the lower one
has waited longer for its turn, by the difference of their head starts.  That wait restarts with
each turn, so many old requests of a low priority delay a higher one only now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import copysign, sqrt
from typing import Final

from router.core.state import RequestState
from wire.process.fair_queue import FairQueue

# The head start of priority 100 over 0, and of 0 over -100, as a share of the queue's timeout.  So
# the first request of each client is reached in half of the timeout.
HEAD_START: Final = 0.25
MAX_PRIORITY: Final = 100


class Level:
    """The requests of one priority, and the time since which each client waits for its turn."""

    def __init__(self, head_start_s: float) -> None:
        self.lines: FairQueue[str, RequestState] = FairQueue()
        # In the order of turns.
        self.waiting_since: dict[str, float] = {}
        self._head_start_s = head_start_s

    @property
    def order(self) -> tuple[float, float]:
        """The sort key of its first request; the lowest of all levels is next."""
        first = self.lines.first()
        assert first is not None, "an empty level is dropped"
        return self.waiting_since[first[0]] - self._head_start_s, -self._head_start_s


class Queue:
    """Waiting requests.  Only `displaced_by` takes longer when more of them wait."""

    def __init__(self, timeout_s: float) -> None:
        """Make an empty queue whose requests wait for `timeout_s` at most."""
        self._timeout_s = timeout_s
        self._levels: dict[int, Level] = {}  # 201 at most (wire.options); none is empty
        self._num_of_client: Counter[str] = Counter()
        self._size = 0
        self._next: Level | None = None  # the one with the request that is first

    def __len__(self) -> int:
        return self._size

    def add(self, state: RequestState) -> None:
        """Put a request at the end of its client's line."""
        level, client = self._enter(state), state.request.client
        level.waiting_since.setdefault(client, state.submitted_at)
        level.lines.add(client, state)
        self._look()

    def add_first(self, state: RequestState) -> None:
        """Put a retried request before all others of its priority."""
        level, client = self._enter(state), state.request.client
        first = level.lines.first()
        others = state.submitted_at if first is None else level.waiting_since[first[0]]
        level.waiting_since[client] = min(state.submitted_at, others)
        level.lines.add_first(client, state)
        self._look()

    def take(self, state: RequestState, now: float) -> None:
        """Take out the request that is placed; its client goes behind the others."""
        level, client = self._levels[state.request.options.priority], state.request.client
        level.waiting_since[client] = now
        level.lines.end_turn(client)
        self.remove(state)

    def remove(self, state: RequestState) -> None:
        """Take out a request that ended; its client keeps its turn.  Idempotent."""
        priority, client = state.request.options.priority, state.request.client
        level = self._levels.get(priority)
        if level is None or not level.lines.remove(client, state):
            return
        self._size -= 1
        self._num_of_client[client] -= 1
        if not self._num_of_client[client]:  # It may have requests of other priorities.
            del self._num_of_client[client]
        if not level.lines.num_of(client):
            del level.waiting_since[client]
        if not level.lines:
            del self._levels[priority]
        self._look()

    def first(self) -> RequestState | None:
        """Return the next request without taking it out."""
        first = None if self._next is None else self._next.lines.first()
        return None if first is None else first[1]

    def is_behind(self, state: RequestState) -> bool:
        """Whether a waiting request comes before this new one."""
        head_start_s = self._head_start_s(state.request.options.priority)
        order = state.submitted_at - head_start_s, -head_start_s
        return self._next is not None and self._next.order <= order

    def displaced_by(self, state: RequestState, held: Mapping[str, int]) -> RequestState | None:
        """Return the request that a new one displaces from the full queue; None if there is none.

        The client with the most requests loses its last one of the lowest priority, if the new
        one's client has fewer, so that no client can block others.  `held` counts by client the
        requests that wait for DECODE_REQUEST, as if they waited here.
        """
        if not self._size:
            return None

        def weight(client: str) -> int:
            return self._num_of_client[client] + held.get(client, 0)

        heaviest = max(self._num_of_client, key=weight)
        if weight(state.request.client) + 1 >= weight(heaviest):
            return None
        last = (self._levels[each].lines.last_of(heaviest) for each in sorted(self._levels))
        return next(state for state in last if state is not None)

    def _enter(self, state: RequestState) -> Level:
        priority = state.request.options.priority
        self._size += 1
        self._num_of_client[state.request.client] += 1
        if priority not in self._levels:
            self._levels[priority] = Level(self._head_start_s(priority))
        return self._levels[priority]

    def _look(self) -> None:
        self._next = min(self._levels.values(), key=lambda level: level.order, default=None)

    def _head_start_s(self, priority: int) -> float:
        """The head start over priority 0; the first points weigh most."""
        part = copysign(sqrt(abs(priority) / MAX_PRIORITY), priority)
        return part * HEAD_START * self._timeout_s


def heaviest_first(
    states: Sequence[RequestState], may_go: Sequence[bool]
) -> Iterator[RequestState]:
    """Yield the requests that may go, each time the oldest of the client with the most left.

    `states` are sorted by age; those that may not go count for their client too.
    """
    count = Counter(state.request.client for state in states)
    lines: dict[str, list[RequestState]] = {}
    for state, is_free in zip(reversed(states), reversed(may_go), strict=True):
        if is_free:
            lines.setdefault(state.request.client, []).append(state)
    while lines:
        client = max(lines, key=lambda client: count[client])
        yield lines[client].pop()
        count[client] -= 1
        if not lines[client]:
            del lines[client]
