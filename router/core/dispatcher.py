"""The life of a request inside the router, from `submit` to its one end.

    WAITING -> PREFILL -> (HELD ->) DECODE
    any of them -> done | error | cancelled

The faces submit and cancel, the bus passes on what workers say (`router.core.replies`), sinks hear
of it.  A failed attempt is followed by another that goes on at the next token
(`router.core.failover`).  Pure: it sends through a callable and takes its time from an injected
clock; `tick` looks for what is overdue.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import structlog

from router.core.fleet import Fleet
from router.core.index import PrefixIndex
from router.core.placement import Placement
from router.core.replies import Replies
from router.core.request import Request, Sink
from router.core.state import Limits, Observer, RequestState, Send, new_tokens
from router.core.table import RequestTable
from router.core.worker import Worker
from wire.errors import ErrorCode, WireError
from wire.frames import AS_MANY_AS_FIT
from wire.parts import Message
from wire.payloads import Usage

__all__ = ["Dispatcher", "Limits", "Observer", "Send"]

log = structlog.get_logger("router")


class Dispatcher:
    """Every request of this router.

    `rejected` counts refused submissions by the label of their code; `is_draining` refuses all new
    ones.  `request_ids` name the attempts (`router.core.request_ids`).
    """

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        send: Send,
        *,
        limits: Limits,
        request_ids: Iterator[int],
        clock: Callable[[], float],
    ) -> None:
        self.is_draining = False
        self._limits = limits
        self._send = send
        self._clock = clock
        self._placement = Placement(fleet, index, limits=limits, request_ids=request_ids)
        self._table = RequestTable(fleet, self._placement, send, limits=limits, clock=clock)
        self._replies = Replies(self._table, self._placement, send, limits=limits, clock=clock)
        self._handles = itertools.count(1)

        self.rejected: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        """Requests that are placed on workers."""
        return len(self._table.attempts)

    @property
    def num_waiting(self) -> int:
        """Requests that wait: for a worker with room, or to be tried again."""
        return len(self._table.open) - len(self._table.attempts)

    @property
    def dropped(self) -> Counter[str]:
        """Frames of workers that changed nothing, by the reason."""
        return self._replies.dropped

    @property
    def failovers(self) -> Counter[str]:
        """Attempts that were followed by another, by the label of the code they failed with."""
        return self._table.failovers

    @property
    def observers(self) -> list[Observer]:
        """Who hears of every end; append to it."""
        return self._table.observers

    def check_prompt(self, num_tokens: int) -> None:
        """Refuse a prompt that no worker takes, before its ids are read.

        Raises:
            WireError: CONTEXT_LENGTH_EXCEEDED.
        """
        try:
            self._placement.check_tokens(num_tokens, 1)
        except WireError as error:
            self.rejected[error.code.label] += 1
            raise

    def submit(self, request: Request, sink: Sink) -> int:
        """Accept a request and return its handle; `sink` hears of it from now on.

        Raises:
            WireError: It was refused; no worker has seen it and `sink` hears nothing.
        """
        now = self._clock()
        deadline_ms = request.options.deadline_ms
        deadline = now + (self._limits.deadline_s if deadline_ms is None else deadline_ms / 1000)
        state = RequestState(
            handle=next(self._handles),
            request=request,
            sink=sink,
            new_tokens=new_tokens(request),
            is_decode_asked=request.max_new_tokens is not None,
            submitted_at=now,
            deadline=deadline,
            due=min(deadline, now + self._limits.queue_timeout_s),
        )
        try:
            if self.is_draining:
                raise WireError(ErrorCode.DRAINING, "the router is shutting down")
            self._table.add(state)
        except WireError as error:
            self.rejected[error.code.label] += 1
            raise
        return state.handle

    def decode(self, handle: int, max_new_tokens: int) -> None:
        """The client of a request without `max_new_tokens` says how many it wants; once."""
        state = self._table.open.get(handle)
        if state is None or state.is_decode_asked:
            return
        state.is_decode_asked = True
        try:
            if max_new_tokens == AS_MANY_AS_FIT and state.new_tokens is None:
                state.new_tokens = self._placement.num_that_fit(state)
            elif state.new_tokens is None or max_new_tokens < state.new_tokens:
                state.new_tokens = max_new_tokens
            self._placement.check_length(state)
        except WireError as error:
            self._table.fail(state, error)
        else:
            self._replies.go_on(state)
        self._table.place_waiting()

    def stop(self, handle: int) -> None:
        """End a request whose client has all it asked for, a stop string came: a success."""
        state = self._table.open.get(handle)
        if state is not None:
            usage = Usage(finish_reason="stop", kv_bytes=state.kv_bytes)
            self._table.end(state, None, usage=usage)
            self._table.place_waiting()

    def cancel(self, handle: int, code: ErrorCode = ErrorCode.CANCELLED) -> None:
        """Drop a request; its sink hears nothing more.  Unknown handles are ignored."""
        state = self._table.open.get(handle)
        if state is not None:
            self._table.end(state, code)
            self._table.place_waiting()

    def cancel_all(self, code: ErrorCode, message: str) -> None:
        """End every request with this error: the time to drain is over."""
        for state in list(self._table.open.values()):
            self._table.fail(state, WireError(code, message))

    def tick(self) -> None:
        """End what is overdue, and what holds room that others wait for without need of it.

        Call it several times a second.
        """
        self._table.fail_overdue()
        self._table.place_waiting()
        self._table.make_way()

    def on_message(self, peer: bytes, message: Message) -> None:
        """Take a message of a registered worker.

        Raises:
            RemoteProtocolError: It is none that a worker sends.  What breaks the rules of a single
                request raises nothing and ends that request.
        """
        self._replies.on_message(peer, message)
        self._table.place_waiting()

    def on_lost(self, peer: bytes) -> None:
        """A worker is gone, back anew, or stands still: what was placed on it goes elsewhere."""
        self._table.fail_worker(peer)
        self._table.place_waiting()

    def on_capacity(self) -> None:
        """A worker joined or freed blocks."""
        self._table.place_waiting()

    def let_go(self, worker: Worker) -> None:
        """A worker drains: echo DRAIN as soon as nothing refers to it."""
        self._table.let_go(worker)
