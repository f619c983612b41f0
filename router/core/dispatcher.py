"""The life of a request inside the router, from `submit` to its one end.

    WAITING -> PREFILL -> (HELD ->) DECODE
    any of them -> done | error | cancelled

HTTP and raw TCP submit and cancel requests, the bus passes on frames of workers
(`router.core.replies`), and each request's sink gets the results.  Every end goes through `_end`:
its first call takes the request off the table, later ones do nothing.  A failed attempt goes
through `fail_attempt`: another one continues at the next token (`router.core.failover`), or the
request ends.  Pure: the transport and the clock are arguments, and `tick` finds overdue requests.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import structlog
from msgspec import structs

from router.core.failover import AGAIN, RetryBudget, at_fault, given_up, pause_s
from router.core.fleet import Fleet, Worker, WorkerState
from router.core.placement import Placement
from router.core.prefixes import PrefixIndex
from router.core.queue import Queue, heaviest_first
from router.core.replies import Replies
from router.core.request import Request, Sink
from router.core.state import (
    Attempt,
    Limits,
    Observer,
    Phase,
    RequestState,
    Send,
    new_tokens,
    no_worker,
)
from wire.errors import ErrorCode, PeerLost, WireError
from wire.frames import AS_MANY_AS_FIT, NO_RANK, Cancel, DecodeRequest, Drain, PrefillRequest, Role
from wire.parts import Message
from wire.payloads import Usage, encode_continuation, encode_prompt
from wire.process.log_limit import RepeatedLine

log = structlog.get_logger("router")

# A held request keeps its KV this long even if others wait: PREFILL_DONE and DECODE_REQUEST have to
# travel, perhaps around the world.  SPEC 7.
HOLD_GRACE_S: Final = 1.0


class Dispatcher:
    """Every request of this router.

    `request_ids` name the attempts (`router.core.state.RequestIds`).

    Attributes:
        is_draining: New requests are refused.
        rejected: Requests that `submit` and `check_prompt` refused, by error code.
        failovers: Attempts that were followed by another, by the error code of the first.
        observers: Called at every end; append to it.
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
        self._fleet = fleet
        self._send = send
        self._clock = clock
        self._placement = Placement(fleet, index, limits=limits, request_ids=request_ids)
        self._budget = RetryBudget(limits.retry_burst, clock())
        self._replies = Replies(self, self._placement, limits=limits, clock=clock)
        self._followed = RepeatedLine(log.warning, "attempt failed, another follows", clock)
        self._handles = itertools.count(1)

        self._open: dict[int, RequestState] = {}  # by handle
        self._attempts: dict[int, Attempt] = {}  # by request id
        self._waiting = Queue(limits.queue_timeout_s)
        # Requests that pause before another attempt, with the end of their pause.
        self._resting: list[tuple[float, RequestState]] = []

        self.rejected: Counter[str] = Counter()
        self.failovers: Counter[str] = Counter()
        self.observers: list[Observer] = []

    @property
    def num_running(self) -> int:
        """The number of requests that are placed on workers."""
        return len(self._attempts)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a worker with room or for another attempt."""
        return len(self._open) - len(self._attempts)

    @property
    def dropped(self) -> Counter[str]:
        """Dropped frames of workers, by reason."""
        return self._replies.dropped

    def check_prompt(self, num_tokens: int) -> None:
        """Refuse a prompt that is too long for every worker, before its token ids are decoded."""
        try:
            self._placement.check_tokens(num_tokens, 1)
        except WireError as error:
            self.rejected[error.code.label] += 1
            raise

    def submit(self, request: Request, sink: Sink) -> int:
        """Accept a request, whose results go to `sink`, and return its handle.

        Raises:
            WireError: The request is refused; no worker has seen it, and `sink` is not called.
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
            self._add(state)
        except WireError as error:
            self.rejected[error.code.label] += 1
            raise
        return state.handle

    def decode(self, handle: int, max_new_tokens: int) -> None:
        """Set the number of tokens that a raw TCP client wants; only the first call counts."""
        state = self._open.get(handle)
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
            self._fail(state, error)
        else:
            self.go_on(state)
        self._place_waiting()

    def stop(self, handle: int) -> None:
        """End a request at a stop string; its sink gets only `on_end`."""
        state = self._open.get(handle)
        if state is not None:
            usage = Usage(finish_reason="stop", kv_bytes=state.kv_bytes)
            self._end(state, None, usage=usage)
            self._place_waiting()

    def cancel(self, handle: int, code: ErrorCode = ErrorCode.CANCELLED) -> None:
        """Drop a request; its sink gets only `on_end`.  An unknown handle is ignored."""
        state = self._open.get(handle)
        if state is not None:
            self._end(state, code)
            self._place_waiting()

    def cancel_all(self, code: ErrorCode, message: str) -> None:
        """End every request with this error."""
        for state in list(self._open.values()):
            self._fail(state, WireError(code, message))

    def tick(self) -> None:
        """End overdue requests, and held ones while others wait for their KV; call it often."""
        self._fail_overdue()
        self._place_waiting()
        self._make_way()
        self._replies.tick()
        self._followed.tick()

    def on_message(self, peer: bytes, message: Message) -> None:
        """Handle a message of a registered worker.

        Raises:
            RemoteProtocolError: Workers do not send such messages.  A frame that breaks the rules
                for one request only fails that attempt.
        """
        self._replies.on_message(peer, message)
        self._place_waiting()

    def on_lost(self, peer: bytes) -> None:
        """Move the requests of a worker that is lost, restarted or stalled."""
        self._fail_worker(peer)
        self._place_waiting()

    def on_capacity(self) -> None:
        """Place waiting requests after a worker joined or freed blocks."""
        self._place_waiting()

    # Called by `router.core.replies`.

    @property
    def attempts(self) -> Mapping[int, Attempt]:
        """The attempts that have not ended, by id."""
        return self._attempts

    def is_open(self, state: RequestState) -> bool:
        """Whether the request has not ended yet."""
        return state.handle in self._open

    def go_on(self, state: RequestState) -> None:
        """Start decoding once the first token is there and the client wants more."""
        if state.phase is not Phase.HELD or not state.is_decode_asked:
            return
        attempt, num_left = state.attempt, state.num_left
        if num_left == 0:
            self.finish_early(state, Usage(finish_reason="length"))
        elif attempt is None:  # it failed while the request was held
            self._requeue(state)
        elif num_left is not None and attempt.decode is not None:
            state.phase, state.due = Phase.DECODE, state.deadline
            attempt.num_due = num_left
            if attempt.is_local:
                return  # the worker goes on by itself
            self._send(
                attempt.decode.identity,
                DecodeRequest(attempt.request_id, num_left),
                encode_continuation(state.token_ids, attempt.options(self._clock())),
            )

    def finish_early(self, state: RequestState, usage: Usage) -> None:
        """End a request well whose prefill token was its last."""
        attempt = state.attempt
        if attempt is not None and attempt.is_local:
            self.release_decode(attempt)
        elif attempt is not None and attempt.decode is None:
            self.release_prefill(attempt)  # no KV is handed over: the worker is done
        self.finish(state, structs.replace(usage, kv_bytes=state.kv_bytes))

    def finish(self, state: RequestState, usage: Usage) -> None:
        """End a request well; its usage counts the tokens that the client got."""
        usage = structs.replace(usage, completion_tokens=len(state.generated))
        if self._end(state, None, usage=usage):
            try:
                state.sink.on_done(usage)
            except Exception:
                log.exception("a sink failed", client=state.request.client)

    def drop_sink(self, state: RequestState) -> None:
        """End a request whose sink raised; call it in the except clause."""
        log.exception("a sink failed", client=state.request.client)
        self._fail(state, WireError(ErrorCode.INTERNAL, "internal error of the router"))

    def fail_attempt(
        self,
        attempt: Attempt,
        error: WireError,
        *,
        blamed: Worker | None = None,
        spare: Worker | None = None,
    ) -> None:
        """Follow a failed attempt by another one, or end its request with `error`.

        Its workers get CANCEL, except `spare`, which knows already or is gone.  The next attempt
        avoids the worker that is `blamed`, if it can.
        """
        state, now = attempt.state, self._clock()
        if state.num_left == 0:  # the client has every token: only DECODE_DONE was missing
            self.finish(state, Usage(finish_reason="length", kv_bytes=state.kv_bytes))
            return
        reason = self._no_retry(state, error, now)
        if reason is not None:
            self._fail(state, given_up(state, error, reason), spare)
            return
        state.trouble = given_up(state, error, "no worker had room for another")
        state.avoided |= at_fault(attempt, error, blamed)
        self._abandon(attempt, ErrorCode.CANCELLED, spare)
        self.failovers[error.code.label] += 1
        self._followed.add({"reason": error.message, "code": error.code.label})
        if state.phase is Phase.HELD:
            return  # `go_on` queues it when the client wants more
        pause = pause_s(state, error)
        if pause:
            state.phase, state.due = Phase.WAITING, state.deadline
            self._resting.append((now + pause, state))
        else:
            self._requeue(state)

    def release_prefill(self, attempt: Attempt) -> None:
        """Take the attempt off its prefill worker, which is done with it."""
        worker = self._placement.release_prefill(attempt)
        if worker is not None:
            self.let_go(worker)

    def release_decode(self, attempt: Attempt) -> None:
        """Take the attempt off its decode worker, which is done with it."""
        worker = self._placement.release_decode(attempt)
        if worker is not None:
            self.let_go(worker)

    def let_go(self, worker: Worker) -> None:
        """Answer DRAIN if the worker drains and has no attempt left."""
        if worker.state is WorkerState.DRAINING and not worker.attempts:
            self._send(worker.identity, Drain(worker.epoch, 0))

    # Waiting, placing, ending.

    def _add(self, state: RequestState) -> None:
        """Place a request or queue it.

        Raises:
            WireError: It can never be served, or the queue is full: OVERLOADED, or NO_WORKER if
                there is no worker.
        """
        self._placement.check(state)
        if self._waiting.is_behind(state) or not self._place(state):
            self._placement.check_workers(state, self._clock())
            self._make_room(state)
            self._waiting.add(state)
        self._open[state.handle] = state
        self._budget.earn()

    def _requeue(self, state: RequestState) -> None:
        """Queue a request for another attempt, before those that had none yet."""
        state.phase = Phase.WAITING
        state.due = min(state.deadline, self._clock() + self._limits.queue_timeout_s)
        self._waiting.add_first(state)

    def _place_waiting(self) -> None:
        """Place waiting requests while there is room."""
        if self._resting:
            self._wake()
        while (state := self._waiting.first()) is not None and self._place(state):
            self._waiting.take(state, self._clock())

    def _make_way(self) -> None:
        """Place waiting requests; if there is no room, end held ones past their grace."""
        while (state := self._waiting.first()) is not None:
            if self._place(state):
                self._waiting.take(state, self._clock())
                continue
            giving = self._placement.give_way(state, self._giving_way())
            if not giving:
                return
            for each in giving:
                message = (
                    "others need the room of the KV cache, and no DECODE_REQUEST came within "
                    f"{HOLD_GRACE_S:g} s of PREFILL_DONE; send it with PREFILL_REQUEST"
                )
                self._fail(each, WireError(ErrorCode.OVERLOADED, message))

    def _end(
        self,
        state: RequestState,
        code: ErrorCode | None,
        *,
        usage: Usage | None = None,
        spare: Worker | None = None,
    ) -> bool:
        """Take a request off the table and report its end to its sink and the observers.

        Returns False if it has ended already.  Its workers get CANCEL, except `spare`, which knows
        already or is gone.
        """
        if self._open.pop(state.handle, None) is None:
            return False
        self._waiting.remove(state)
        if state.attempt is not None:
            self._abandon(state.attempt, code or ErrorCode.CANCELLED, spare)
        end = state.end(self._clock(), code, usage)
        for observer in self.observers:
            observer.on_request_end(end)
        state.sink.on_end(end)
        return True

    def _fail(self, state: RequestState, error: WireError, spare: Worker | None = None) -> None:
        """End a request with an error."""
        if self._end(state, error.code, spare=spare):
            try:
                state.sink.on_error(error)
            except Exception:
                log.exception("a sink failed", client=state.request.client)

    def _fail_worker(self, peer: bytes) -> None:
        """Fail every attempt on a worker that is lost, restarted or stalled."""
        is_here = self._fleet.get(peer) is not None
        for attempt in tuple(self._attempts.values()):
            for worker in (attempt.prefill, attempt.decode):
                if worker is not None and worker.identity == peer:
                    # A worker that is still here may be working on it, so it gets CANCEL.
                    spare = None if is_here else worker
                    self.fail_attempt(attempt, PeerLost(worker.name), spare=spare)
                    break

    def _fail_overdue(self) -> None:
        """End every request that is overdue."""
        now = self._clock()
        for state in [state for state in self._open.values() if state.due <= now]:
            error = state.overdue(now)
            if state.phase is Phase.WAITING and error.code is ErrorCode.OVERLOADED:
                error = self._missing_worker(state) or error
            self._fail(state, error)

    def _place(self, state: RequestState) -> bool:
        now = self._clock()
        attempt = self._placement.place(state, now)
        if attempt is None:
            return False
        self._attempts[attempt.request_id] = state.attempt = attempt
        state.num_attempts += 1
        state.phase, state.due = Phase.PREFILL, state.deadline
        state.placed_at = state.placed_at or now
        rank = NO_RANK if attempt.decode is None else attempt.decode.rank
        self._send(
            attempt.reader.identity,
            PrefillRequest(attempt.request_id, attempt.seq_len, rank),
            encode_prompt(state.token_ids, attempt.options(now)),
        )
        return True

    def _parked(self) -> list[RequestState]:
        table = [attempt.state for attempt in self._attempts.values()]
        return [state for state in table if state.is_parked]

    def _giving_way(self) -> Iterator[RequestState]:
        """Yield held requests past their grace, those of the client that holds most first."""
        parked, limit = self._parked(), self._clock() - HOLD_GRACE_S
        is_late = [state.first_at is not None and state.first_at <= limit for state in parked]
        return heaviest_first(parked, is_late)

    def _make_room(self, state: RequestState) -> None:
        if len(self._waiting) < self._limits.max_waiting:
            return
        message = f"{len(self._waiting)} requests are waiting for a worker already; try later"
        overloaded = WireError(ErrorCode.OVERLOADED, message)
        held = Counter(each.request.client for each in self._parked())
        displaced = self._waiting.displaced_by(state, held)
        if displaced is None:
            raise self._missing_worker(state) or overloaded
        self._fail(displaced, self._missing_worker(displaced) or overloaded)

    def _no_retry(self, state: RequestState, error: WireError, now: float) -> str | None:
        """Return why there is no further attempt ("" if the error says it); None if there is one.

        The checks of `submit` are repeated, because generated tokens lengthen the prompt.
        """
        if error.code not in AGAIN:
            return ""
        if state.num_attempts >= self._limits.max_attempts:
            return "" if self._limits.max_attempts == 1 else "no more are made"
        try:
            self._placement.check(state)
            self._placement.check_workers(state, now)
        except WireError as problem:
            if problem.code is not ErrorCode.NO_WORKER:
                return problem.message
        return None if self._budget.spend(now) else "too many are made at the moment"

    def _wake(self) -> None:
        now = self._clock()
        due = [state for at, state in self._resting if at <= now]
        self._resting = [entry for entry in self._resting if entry[0] > now]
        for state in due:
            if state.handle in self._open:
                self._requeue(state)

    def _abandon(self, attempt: Attempt, code: ErrorCode, spare: Worker | None) -> None:
        del self._attempts[attempt.request_id]
        attempt.state.attempt = None
        for worker, release in (
            (attempt.prefill, self.release_prefill),
            (attempt.decode, self.release_decode),
        ):
            if worker is not None:
                if worker is not spare:
                    self._send(worker.identity, Cancel(attempt.request_id, code))
                release(attempt)

    def missing_roles(self) -> list[Role]:
        """Return the roles without a ready worker that requests need."""
        needed = (Role.DECODE,) if self._limits.local_prefill else (Role.PREFILL, Role.DECODE)
        return [role for role in needed if not self._fleet.ready(role)]

    def _missing_worker(self, state: RequestState) -> WireError | None:
        missing = self.missing_roles()
        if state.num_left == 1 and Role.PREFILL not in missing:
            return None
        return no_worker(missing[0]) if missing else None
