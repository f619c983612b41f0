"""The table of open requests: who waits, who is placed, and how each ends exactly once.

Ending is one function, `end`: whatever comes first takes the request off every table, and whatever
comes later finds nothing.  An attempt that fails is followed by another or ends its request, and
that too is one function, `fail_attempt`.  What workers say is `router.core.replies`; here are only
the books.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import structlog
from msgspec import structs

from router.core.failover import AGAIN, RetryBudget, given_up, pause_s
from router.core.fleet import Fleet
from router.core.placement import Placement
from router.core.queue import Queue
from router.core.state import Attempt, Limits, Observer, Phase, RequestState, Send, no_worker
from router.core.worker import Worker, WorkerState
from wire.errors import ErrorCode, PeerLost, WireError
from wire.frames import NO_RANK, Cancel, Drain, PrefillRequest, Role
from wire.payloads import Usage, encode_prompt

log = structlog.get_logger("router")

# A prefilled request keeps its room for this long, whoever waits: a client that answers
# PREFILL_DONE with DECODE_REQUEST needs one way there and back, be it around the world.  SPEC 7
HOLD_GRACE_S: Final = 1.0


class RequestTable:
    """Open requests by handle, attempts by request id, and those that wait."""

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
        self._limits = limits
        self._budget = RetryBudget(limits.retry_burst, clock())
        self._clock = clock

        self.open: dict[int, RequestState] = {}
        self.attempts: dict[int, Attempt] = {}
        self.waiting = Queue()
        self._resting: list[tuple[float, RequestState]] = []
        self.failovers: Counter[str] = Counter()
        self.observers: list[Observer] = []

    def add(self, state: RequestState) -> None:
        """Place a request, or let it wait behind those that wait already.

        Raises:
            WireError: It can never be served, or too many are waiting: OVERLOADED, or NO_WORKER if
                it is a worker that is missing, not its room.
        """
        self._placement.check(state, self._clock())
        if self.waiting.is_behind(state) or not self._place(state):
            self._make_room(state)
            self.waiting.add(state)
        self.open[state.handle] = state
        self._budget.earn()

    def requeue(self, state: RequestState) -> None:
        """Let a request without an attempt have another, before those that had none yet."""
        state.phase = Phase.WAITING
        state.due = min(state.deadline, self._clock() + self._limits.queue_timeout_s)
        self.waiting.add_first(state)

    def place_waiting(self) -> None:
        """Place what waits while there is room."""
        if self._resting:
            self._wake()
        while (state := self.waiting.first()) is not None and self._place(state):
            self.waiting.remove(state)

    def make_way(self) -> None:
        """Place what waits, ending what is held without being asked on where there is no room."""
        while (state := self.waiting.first()) is not None:
            if self._place(state):
                self.waiting.remove(state)
                continue
            giving = self._placement.give_way(state, self._parked_too_long())
            if not giving:
                return
            for each in giving:
                message = (
                    "others need the room of the KV cache, and no DECODE_REQUEST came within "
                    f"{HOLD_GRACE_S:g} s of PREFILL_DONE; send it with PREFILL_REQUEST"
                )
                self.fail(each, WireError(ErrorCode.OVERLOADED, message))

    def end(
        self,
        state: RequestState,
        code: ErrorCode | None,
        *,
        usage: Usage | None = None,
        spare: Worker | None = None,
    ) -> bool:
        """Take a request off the table, silently; False when it has ended already.

        Its workers are told to drop it, all but the one to `spare`, which has done so.
        """
        if self.open.pop(state.handle, None) is None:
            return False
        self.waiting.remove(state)
        if state.attempt is not None:
            self._abandon(state.attempt, code or ErrorCode.CANCELLED, spare)
        end = state.end(self._clock(), code, usage)
        for observer in self.observers:
            observer.on_request_end(end)
        state.sink.on_end(end)
        return True

    def finish(self, state: RequestState, usage: Usage) -> None:
        """End a request well; `completion_tokens` is what the client really got."""
        usage = structs.replace(usage, completion_tokens=len(state.generated))
        if self.end(state, None, usage=usage):
            try:
                state.sink.on_done(usage)
            except Exception:
                log.exception("a sink failed", client=state.request.client)

    def fail(self, state: RequestState, error: WireError, spare: Worker | None = None) -> None:
        """End a request with an error."""
        if self.end(state, error.code, spare=spare):
            try:
                state.sink.on_error(error)
            except Exception:
                log.exception("a sink failed", client=state.request.client)

    def drop_sink(self, state: RequestState) -> None:
        """A sink raised: log it (from the except clause) and end its request, and no other."""
        log.exception("a sink failed", client=state.request.client)
        self.fail(state, WireError(ErrorCode.INTERNAL, "internal error of the router"))

    def fail_attempt(
        self,
        attempt: Attempt,
        error: WireError,
        *,
        blamed: Worker | None = None,
        spare: Worker | None = None,
    ) -> None:
        """An attempt is over: make another one, or end its request with `error`.

        Its workers are told to drop it, all but the one to `spare`, which has done so.  The next
        one is placed elsewhere than on the `blamed`, if it can.
        """
        state, now = attempt.state, self._clock()
        if state.num_left == 0:  # The client has every token: only the end was missing.
            self.finish(state, Usage(finish_reason="length", kv_bytes=state.kv_bytes))
            return
        reason = self._no_retry(state, error, now)
        if reason is not None:
            self.fail(state, given_up(state, error, reason), spare)
            return
        state.trouble = given_up(state, error, "no worker had room for another")
        state.avoided |= _blamed(attempt, error, blamed)
        self._abandon(attempt, ErrorCode.CANCELLED, spare)
        state.attempt = None
        self.failovers[error.code.label] += 1
        log.warning("attempt failed, another follows", reason=error.message, code=error.code.label)
        if state.phase is Phase.HELD:
            return  # The client has not said that it wants more.
        pause = pause_s(state, error)
        if pause:
            state.phase, state.due = Phase.WAITING, state.deadline
            self._resting.append((now + pause, state))
        else:
            self.requeue(state)

    def fail_worker(self, peer: bytes) -> None:
        """Fail every attempt that needs this worker, which is gone or came back anew."""
        is_back = self._fleet.get(peer) is not None
        for attempt in tuple(self.attempts.values()):
            for worker in (attempt.prefill, attempt.decode):
                if worker is not None and worker.identity == peer:
                    # One that came back still runs its half and is told to stop.
                    spare = None if is_back else worker
                    self.fail_attempt(attempt, PeerLost(worker.name), spare=spare)
                    break

    def fail_overdue(self) -> None:
        """End every request whose time is over."""
        now = self._clock()
        for state in [state for state in self.open.values() if state.due <= now]:
            error = state.overdue(now)
            if state.phase is Phase.WAITING and error.code is ErrorCode.OVERLOADED:
                error = self._missing_worker(state) or error
            self.fail(state, error)

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

    def _place(self, state: RequestState) -> bool:
        attempt = self._placement.place(state)
        if attempt is None:
            return False
        assert attempt.prefill is not None
        now = self._clock()
        self.attempts[attempt.request_id] = state.attempt = attempt
        state.num_attempts += 1
        state.phase, state.due = Phase.PREFILL, state.deadline
        state.placed_at = state.placed_at or now
        rank = NO_RANK if attempt.decode is None else attempt.decode.rank
        self._send(
            attempt.prefill.identity,
            PrefillRequest(attempt.request_id, attempt.seq_len, rank),
            encode_prompt(state.token_ids, attempt.options(now)),
        )
        return True

    def _parked(self) -> list[RequestState]:
        table = [attempt.state for attempt in self.attempts.values()]
        return [state for state in table if state.is_parked]

    def _parked_too_long(self) -> Iterator[RequestState]:
        """Yield what gives way, in order: always the oldest of the client that holds most."""
        limit = self._clock() - HOLD_GRACE_S
        parked = self._parked()
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

    def _make_room(self, state: RequestState) -> None:
        if len(self.waiting) < self._limits.max_waiting:
            return
        message = f"{len(self.waiting)} requests are waiting for a worker already; try later"
        overloaded = WireError(ErrorCode.OVERLOADED, message)
        held = Counter(each.request.client for each in self._parked())
        displaced = self.waiting.displaced_by(state, held)
        if displaced is None:
            raise self._missing_worker(state) or overloaded
        self.fail(displaced, self._missing_worker(displaced) or overloaded)

    def _no_retry(self, state: RequestState, error: WireError, now: float) -> str | None:
        """Return why there is no further attempt, empty when that needs no words; None: there is.

        The prompt and its answer may have outgrown a limit that the prompt alone was under.
        """
        if error.code not in AGAIN:
            return ""
        if state.num_attempts >= self._limits.max_attempts:
            return "" if self._limits.max_attempts == 1 else "no more are made"
        try:
            self._placement.check(state, now)
        except WireError as problem:
            if problem.code is not ErrorCode.NO_WORKER:
                return problem.message
        return None if self._budget.spend(now) else "too many are made at the moment"

    def _wake(self) -> None:
        now = self._clock()
        due = [state for at, state in self._resting if at <= now]
        self._resting = [entry for entry in self._resting if entry[0] > now]
        for state in due:
            if state.handle in self.open:
                self.requeue(state)

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

    def _missing_worker(self, state: RequestState) -> WireError | None:
        roles = (Role.PREFILL,) if state.num_left == 1 else (Role.PREFILL, Role.DECODE)
        return next((no_worker(role) for role in roles if not self._fleet.ready(role)), None)


def _blamed(attempt: Attempt, error: WireError, blamed: Worker | None) -> set[bytes]:
    """Return whom the next attempt had better not be placed on: a transfer has two ends."""
    is_between = error.code is ErrorCode.TRANSFER_FAILED
    workers = (attempt.prefill, attempt.decode) if is_between else (blamed,)
    return {worker.identity for worker in workers if worker is not None}
