"""The requests that wait for a worker with room: by priority, then clients in turn, then in order.

Within a priority each client has a line of its own and the lines take turns, so one client's
thousand requests do not hold up another's first.  The head of the queue keeps those behind it
waiting when it does not fit yet: short prompts of the same priority do not starve a long one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from router.core.state import RequestState

Line = OrderedDict[int, RequestState]


class Queue:
    """Waiting requests; every operation is O(1) in their number, but for `displaced_by`."""

    def __init__(self) -> None:
        # At most 201 priorities (wire.options); one without requests has no entry, nor has a line.
        self._by_priority: dict[int, OrderedDict[str, Line]] = {}
        self._num_of_client: Counter[str] = Counter()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, state: RequestState) -> None:
        """Put a request at the end of its client's line."""
        lines = self._by_priority.setdefault(state.request.options.priority, OrderedDict())
        lines.setdefault(state.request.client, OrderedDict())[state.handle] = state
        self._num_of_client[state.request.client] += 1
        self._size += 1

    def add_first(self, state: RequestState) -> None:
        """Put a request before all of its priority: it has waited, and been served, already."""
        self.add(state)
        lines = self._by_priority[state.request.options.priority]
        lines[state.request.client].move_to_end(state.handle, last=False)
        lines.move_to_end(state.request.client, last=False)

    def remove(self, state: RequestState) -> None:
        """Take a request out, and give the others of its priority their turn; idempotent."""
        priority, client = state.request.options.priority, state.request.client
        lines = self._by_priority.get(priority, OrderedDict())
        line = lines.get(client)
        if line is None or line.pop(state.handle, None) is None:
            return
        self._size -= 1
        self._num_of_client[client] -= 1
        if not self._num_of_client[client]:  # It may have requests of other priorities.
            del self._num_of_client[client]
        if line:
            lines.move_to_end(client)
        else:
            del lines[client]
        if not lines:
            del self._by_priority[priority]

    def first(self) -> RequestState | None:
        """Return the request whose turn it is, without taking it out."""
        if not self._by_priority:
            return None
        lines = self._by_priority[max(self._by_priority)]
        return next(iter(next(iter(lines.values())).values()))

    def is_behind(self, state: RequestState) -> bool:
        """Whether someone who waits comes before this new request."""
        first = self.first()
        return first is not None and (
            first.request.options.priority >= state.request.options.priority
        )

    def displaced_by(self, state: RequestState, held: Mapping[str, int]) -> RequestState | None:
        """Return whose place a new request takes when there is none left; None: its own is denied.

        The client with most in the queue gives its last and least important one to another that
        has fewer, so that nobody can keep others out by asking for much.  What a client has `held`
        elsewhere without being asked on counts as if it waited here.
        """
        if not self._size:
            return None

        def weight(client: str) -> int:
            return self._num_of_client[client] + held.get(client, 0)

        heaviest = max(self._num_of_client, key=weight)
        if weight(state.request.client) + 1 >= weight(heaviest):
            return None
        lines = (
            self._by_priority[priority].get(heaviest) for priority in sorted(self._by_priority)
        )
        return next(state for line in lines if line for state in reversed(line.values()))


def heaviest_first(
    states: Sequence[RequestState], may_go: Sequence[bool]
) -> Iterator[RequestState]:
    """Yield those that may go, in order: always the first of the client that has most left.

    `states` are in the order of their age; those that may not go count for their client, too.
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
