"""The requests that wait for a worker with room: by priority, then clients in turn, then in order.

Within a priority each client has a line of its own, and the lines take turns: a thousand requests
of one client do not hold up the first of another.  While the request whose turn it is finds no
worker with room, all others wait: else short prompts would always pass a long one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from router.core.state import RequestState

Line = OrderedDict[int, RequestState]


class Queue:
    """Waiting requests.  No operation but `displaced_by` takes longer when more of them wait."""

    def __init__(self) -> None:
        # By priority (201 at most, wire.options), then by client; nothing empty is kept.
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
        """Put a request before all others of its priority: it has had its turn already."""
        self.add(state)
        lines = self._by_priority[state.request.options.priority]
        lines[state.request.client].move_to_end(state.handle, last=False)
        lines.move_to_end(state.request.client, last=False)

    def remove(self, state: RequestState) -> None:
        """Take a request out; its client's line goes behind the others.  Idempotent."""
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
        """Tell whether a request that waits comes before this new one."""
        first = self.first()
        return first is not None and (
            first.request.options.priority >= state.request.options.priority
        )

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
        lines = (
            self._by_priority[priority].get(heaviest) for priority in sorted(self._by_priority)
        )
        return next(state for line in lines if line for state in reversed(line.values()))


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
