"""The table of open requests: who waits, who is placed, and how each ends exactly once.

Ending is one function, `end`: whatever comes first takes the flight off every table, and whatever
comes later finds nothing.  What workers say is `router.inflight`; here are only the books.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from msgspec import structs

from router.fleet import Fleet, Worker, WorkerState
from router.flight import Attempt, Flight, Limits, Observer, Phase, Send, no_worker
from router.placement import Placement
from router.queue import Queue
from wire.errors import ErrorCode, PeerLost, WireError
from wire.frames import NO_RANK, Cancel, Drain, PrefillRequest, Role
from wire.payloads import Usage, encode_prompt

log = structlog.get_logger("router")


class Flights:
    """Open flights by handle, attempts by request id, and those that wait."""

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        send: Send,
        *,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._placement = placement
        self._send = send
        self._max_waiting = limits.max_waiting
        self._clock = clock

        self.open: dict[int, Flight] = {}
        self.attempts: dict[int, Attempt] = {}
        self.waiting = Queue()
        self.observers: list[Observer] = []

    def add(self, flight: Flight) -> None:
        """Place a flight, or let it wait behind those that wait already.

        Raises:
            WireError: It can never be served, or OVERLOADED: too many are waiting.
        """
        self._placement.check(flight)
        if self.waiting.is_behind(flight) or not self._place(flight):
            if len(self.waiting) >= self._max_waiting:
                raise WireError(
                    ErrorCode.OVERLOADED,
                    f"{len(self.waiting)} requests are waiting for a worker already; try later",
                )
            self.waiting.add(flight)
        self.open[flight.handle] = flight

    def place_waiting(self) -> None:
        """Place what waits while there is room."""
        while (flight := self.waiting.first()) is not None and self._place(flight):
            self.waiting.remove(flight)

    def end(
        self,
        flight: Flight,
        code: ErrorCode | None,
        *,
        usage: Usage | None = None,
        spare: Worker | None = None,
    ) -> bool:
        """Take a flight off the table, silently; False when it has ended already.

        Its workers are told to drop it, all but the one to `spare`, which has done so.
        """
        if self.open.pop(flight.handle, None) is None:
            return False
        self.waiting.remove(flight)
        if flight.attempt is not None:
            self._abandon(flight.attempt, code or ErrorCode.CANCELLED, spare)
        end = flight.end(self._clock(), code, usage)
        for observer in self.observers:
            observer.on_request_end(end)
        return True

    def finish(self, flight: Flight, usage: Usage) -> None:
        """End a flight well; `completion_tokens` is what the client really got."""
        usage = structs.replace(usage, completion_tokens=len(flight.generated))
        if self.end(flight, None, usage=usage):
            try:
                flight.sink.on_done(usage)
            except Exception:
                log.exception("a sink failed", client=flight.request.client)

    def fail(self, flight: Flight, error: WireError, spare: Worker | None = None) -> None:
        """End a flight with an error."""
        if self.end(flight, error.code, spare=spare):
            try:
                flight.sink.on_error(error)
            except Exception:
                log.exception("a sink failed", client=flight.request.client)

    def drop_sink(self, flight: Flight) -> None:
        """A sink raised: log it (from the except clause) and end its request, and no other."""
        log.exception("a sink failed", client=flight.request.client)
        self.fail(flight, WireError(ErrorCode.INTERNAL, "internal error of the router"))

    def fail_worker(self, peer: bytes) -> None:
        """End every flight that needs this worker, which is gone or came back anew."""
        is_back = self._fleet.get(peer) is not None
        for attempt in tuple(self.attempts.values()):
            for worker in (attempt.prefill, attempt.decode):
                if worker is not None and worker.identity == peer:
                    # One that came back still runs its half and is told to stop.
                    spare = None if is_back else worker
                    self.fail(attempt.flight, PeerLost(worker.name), spare=spare)
                    break

    def fail_overdue(self) -> None:
        """End every flight whose time is over."""
        now = self._clock()
        for flight in [flight for flight in self.open.values() if flight.due <= now]:
            error = flight.overdue(now)
            if flight.phase is Phase.WAITING and error.code is ErrorCode.OVERLOADED:
                error = self._missing_worker(flight) or error
            self.fail(flight, error)

    def release_prefill(self, attempt: Attempt) -> None:
        """The prefill worker has nothing more to do for this attempt."""
        worker = self._placement.release_prefill(attempt)
        if worker is not None:
            self.let_go(worker)

    def release_decode(self, attempt: Attempt) -> None:
        """The decode worker has nothing more to do for this attempt."""
        worker = self._placement.release_decode(attempt)
        if worker is not None:
            self.let_go(worker)

    def let_go(self, worker: Worker) -> None:
        """Echo DRAIN to a draining worker that nothing refers to any more."""
        if worker.state is WorkerState.DRAINING and not worker.attempts:
            self._send(worker.identity, Drain(worker.epoch, 0))

    def _place(self, flight: Flight) -> bool:
        attempt = self._placement.place(flight)
        if attempt is None:
            return False
        assert attempt.prefill is not None
        self.attempts[attempt.request_id] = flight.attempt = attempt
        flight.phase, flight.due, flight.placed_at = Phase.PREFILL, flight.deadline, self._clock()
        token_ids = flight.request.token_ids
        rank = NO_RANK if attempt.decode is None else attempt.decode.rank
        self._send(
            attempt.prefill.identity,
            PrefillRequest(attempt.request_id, len(token_ids), rank),
            encode_prompt(token_ids, flight.options),
        )
        return True

    def _abandon(self, attempt: Attempt, code: ErrorCode, spare: Worker | None) -> None:
        del self.attempts[attempt.request_id]
        for worker, release in (
            (attempt.prefill, self.release_prefill),
            (attempt.decode, self.release_decode),
        ):
            if worker is not None:
                if worker is not spare:
                    self._send(worker.identity, Cancel(attempt.request_id, code))
                release(attempt)

    def _missing_worker(self, flight: Flight) -> WireError | None:
        roles = (Role.PREFILL,) if flight.new_tokens == 0 else (Role.PREFILL, Role.DECODE)
        return next((no_worker(role) for role in roles if not self._fleet.ready(role)), None)
