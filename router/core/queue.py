"""The requests that wait for a worker with room: by priority and waiting, then clients in turn.

Each priority has a queue in which clients take turns (`wire.process.fair_queue`).  While the
request whose turn it is finds no worker with room, all others wait: else short prompts would always
pass a long one.

No priority waits for ever.  The higher of two priorities is served first unless the client whose
turn it is in the lower one has waited longer for that turn, by the difference of their head starts.
This wait begins anew with each turn, so that many requests of a low priority, however old, delay
those of a higher one by a single request of each client now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import copysign, sqrt
from typing import Final

from router.core.state import RequestState
from wire.process.fair_queue import FairQueue

# Of the queue's timeout: how much sooner priority 100 is served than 0, and 0 than -100.  So the
# first request of each client is reached in half of the timeout.
HEAD_START: Final = 0.25
MAX_PRIORITY: Final = 100


class Level:
    """The requests of one priority, and since when each client waits for its turn."""

    def __init__(self, head_start_s: float) -> None:
        self.lines: FairQueue[str, RequestState] = FairQueue()
        # Never earlier for a client that is behind another one.
        self.waiting_since: dict[str, float] = {}
        self._head_start_s = head_start_s

    @property
    def order(self) -> tuple[float, float]:
        """Where its first request stands: the lowest of all levels' is served next."""
        first = self.lines.first()
        assert first is not None, "an empty level is dropped"
        return self.waiting_since[first[0]] - self._head_start_s, -self._head_start_s


class Queue:
    """Waiting requests.  No operation but `displaced_by` takes longer when more of them wait."""

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
        """Put a request before all others of its priority: it has had its turn already."""
        level, client = self._enter(state), state.request.client
        first = level.lines.first()
        others = state.submitted_at if first is None else level.waiting_since[first[0]]
        level.waiting_since[client] = min(state.submitted_at, others)
        level.lines.add_first(client, state)
        self._look()

    def take(self, state: RequestState, now: float) -> None:
        """Take out the request that is placed: its client's line goes behind the others."""
        level, client = self._levels[state.request.options.priority], state.request.client
        level.waiting_since[client] = now
        level.lines.end_turn(client)
        self.remove(state)

    def remove(self, state: RequestState) -> None:
        """Take a request out that is not served; its client keeps its turn.  Idempotent."""
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
        """Return the request whose turn it is, without taking it out."""
        first = None if self._next is None else self._next.lines.first()
        return None if first is None else first[1]

    def is_behind(self, state: RequestState) -> bool:
        """Tell whether a request that waits comes before this new one."""
        head_start_s = self._head_start_s(state.request.options.priority)
        order = state.submitted_at - head_start_s, -head_start_s
        return self._next is not None and self._next.order <= order

    def displaced_by(self, state: RequestState, held: Mapping[str, int]) -> RequestState | None:
        """Return which request a new one displaces from the full queue; None: it is refused itself.

        The client with the most requests here loses its last one of the lowest priority, if the new
        one's client has fewer: nobody can keep others out by asking for much.  `held` counts by
        client the requests that wait for DECODE_REQUEST, as if they waited here.
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
        """How much sooner than priority 0 one is served: most for the first points."""
        part = copysign(sqrt(abs(priority) / MAX_PRIORITY), priority)
        return part * HEAD_START * self._timeout_s


def heaviest_first(
    states: Sequence[RequestState], may_go: Sequence[bool]
) -> Iterator[RequestState]:
    """Yield the requests that may go, each time the oldest of the client that has the most left.

    `states` are the oldest first; those that may not go count for their client, too.
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
