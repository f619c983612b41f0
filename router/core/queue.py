"""The queue of requests that wait for a worker: by priority, then round-robin over clients.

Each priority has a fair queue of clients (`wire.process.fair_queue`).  While no worker has capacity
for the first request, all others wait too: otherwise short prompts would always overtake long ones.

No priority starves.  Of two priorities the higher one is served first, unless the next client of
the lower one has waited longer for its turn, by more than the difference of their head starts.
That wait restarts with each turn, so a backlog of a low priority rarely delays a higher one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import copysign, sqrt
from typing import Final

from router.core.state import RequestState
from wire.errors import ErrorCode, WireError
from wire.process.fair_queue import FairQueue

# The head start of priority 100 over 0, and of 0 over -100.  If the queue's timeout is short, it is
# a quarter of that, so the first request of each client gets its turn within half of the timeout.
HEAD_START_S: Final = 7.5
MAX_PRIORITY: Final = 100
# A held request keeps its KV this long even if other requests wait for memory, because PREFILL_DONE
# and DECODE_REQUEST may need a long round trip.  SPEC 7.
HOLD_GRACE_S: Final = 1.0


class Level:
    """The requests of one priority, and since when each client has waited for its turn."""

    def __init__(self, head_start_s: float) -> None:
        self.lines: FairQueue[str, RequestState] = FairQueue()
        # The time by client, in the order of their turns.
        self.waiting_since: dict[str, float] = {}
        self._head_start_s = head_start_s

    @property
    def order(self) -> tuple[float, float]:
        """The sort key of the first request; the level with the lowest key is served next."""
        first = self.lines.first()
        assert first is not None, "an empty level is dropped"
        return self.waiting_since[first[0]] - self._head_start_s, -self._head_start_s


class Queue:
    """The waiting requests.  Only the cost of `displaced_by` grows with their number."""

    def __init__(self, timeout_s: float) -> None:
        """Create an empty queue whose requests wait at most `timeout_s`."""
        self._max_head_start_s = min(HEAD_START_S, timeout_s / 4)
        self._levels: dict[int, Level] = {}  # by priority, at most 201; none is empty
        self._num_of_client: Counter[str] = Counter()
        self._size = 0
        self._next: Level | None = None  # the level with the next request

    def __len__(self) -> int:
        return self._size

    def add(self, state: RequestState) -> None:
        """Append a request to its client's queue."""
        level, client = self._level_for(state), state.request.client
        level.waiting_since.setdefault(client, state.submitted_at)
        level.lines.add(client, state)
        self._update_next()

    def add_first(self, state: RequestState) -> None:
        """Insert a retried request ahead of all others of its priority."""
        level, client = self._level_for(state), state.request.client
        first = level.lines.first()
        others = state.submitted_at if first is None else level.waiting_since[first[0]]
        level.waiting_since[client] = min(state.submitted_at, others)
        level.lines.add_first(client, state)
        self._update_next()

    def take(self, state: RequestState, now: float) -> None:
        """Remove a request that was placed and end its client's turn."""
        level, client = self._levels[state.request.options.priority], state.request.client
        level.waiting_since[client] = now
        level.lines.end_turn(client)
        self.remove(state)

    def remove(self, state: RequestState) -> None:
        """Remove a request that ended; its client keeps its turn.  Idempotent."""
        priority, client = state.request.options.priority, state.request.client
        level = self._levels.get(priority)
        if level is None or not level.lines.remove(client, state):
            return
        self._size -= 1
        self._num_of_client[client] -= 1
        if not self._num_of_client[client]:  # else it has requests of other priorities
            del self._num_of_client[client]
        if not level.lines.num_of(client):
            del level.waiting_since[client]
        if not level.lines:
            del self._levels[priority]
        self._update_next()

    def first(self) -> RequestState | None:
        """Return the next request without removing it."""
        first = None if self._next is None else self._next.lines.first()
        return None if first is None else first[1]

    def is_behind(self, state: RequestState) -> bool:
        """Whether a waiting request is served before this new one."""
        head_start_s = self._head_start_s(state.request.options.priority)
        order = state.submitted_at - head_start_s, -head_start_s
        return self._next is not None and self._next.order <= order

    def displaced_by(self, state: RequestState, held: Mapping[str, int]) -> RequestState | None:
        """Return the request to drop for a new one if the queue is full, or None to refuse it.

        It is the last request, of the lowest priority, of the client with the most requests, if the
        new request's client has fewer.  So no client can block others.  `held` is the number of
        requests waiting for DECODE_REQUEST by client, which count as if they waited here.
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

    def _level_for(self, state: RequestState) -> Level:
        """Count a new request and return its level, creating it if necessary."""
        priority = state.request.options.priority
        self._size += 1
        self._num_of_client[state.request.client] += 1
        if priority not in self._levels:
            self._levels[priority] = Level(self._head_start_s(priority))
        return self._levels[priority]

    def _update_next(self) -> None:
        self._next = min(self._levels.values(), key=lambda level: level.order, default=None)

    def _head_start_s(self, priority: int) -> float:
        """The head start over priority 0, in seconds: it grows with the square root."""
        share = copysign(sqrt(abs(priority) / MAX_PRIORITY), priority)
        return share * self._max_head_start_s


def gave_way() -> WireError:
    """Return the error for a held request that was ended for the sake of waiting ones."""
    message = (
        "others need the room of the KV cache, and no DECODE_REQUEST came within "
        f"{HOLD_GRACE_S:g} s of PREFILL_DONE; send it with PREFILL_REQUEST"
    )
    return WireError(ErrorCode.OVERLOADED, message)


def giving_way(parked: Sequence[RequestState], now: float) -> Iterator[RequestState]:
    """Yield held requests to end, each the oldest of the client with the most of them left.

    `parked` is sorted by age.  Requests held for less than HOLD_GRACE_S are counted, but not ended.
    """
    limit = now - HOLD_GRACE_S
    count = Counter(state.request.client for state in parked)
    lines: dict[str, list[RequestState]] = {}
    for state in reversed(parked):
        if state.first_at is not None and state.first_at <= limit:
            lines.setdefault(state.request.client, []).append(state)
    while lines:
        client = max(lines, key=lambda client: count[client])
        yield lines[client].pop()
        count[client] -= 1
        if not lines[client]:
            del lines[client]
