"""The life cycle of a request inside the router, from `submit` to its end.

    WAITING -> PREFILL -> (HELD ->) DECODE
    any of them -> done | error | cancelled

A HELD request is prefilled and waits for DECODE_REQUEST from a raw TCP client.  HTTP and raw TCP
submit and cancel requests, the bus passes in frames from workers (`router.core.replies`), and each
request's sink receives the results.  Every request ends in `_end`: the first call removes it from
the table, and later calls do nothing.  A failed attempt ends in `fail_attempt`: another continues
at the next token (`router.core.failover`), or the request ends.  Answers of a draining worker are
handed over to others (`on_drain`); a draining router refuses requests (`is_draining`).  No I/O: the
transport and the clock are arguments, and `tick` ends overdue requests.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import structlog
from msgspec import structs

from router.core.failover import RetryBudget, at_fault, given_up, no_retry, pause_s
from router.core.fleet import Fleet, Worker, WorkerState
from router.core.history.requests import History
from router.core.placement import Placement
from router.core.prefixes import PrefixIndex
from router.core.queue import Queue, gave_way, giving_way
from router.core.replies import Replies
from router.core.request import Request, Sink
from router.core.state import Attempt, Limits, Observer, Phase, RequestState, Send, begin
from wire.errors import ErrorCode, PeerLost, WireError
from wire.frames import AS_MANY_AS_FIT, NO_RANK, Cancel, DecodeRequest, Drain, PrefillRequest, Role
from wire.parts import Message
from wire.payloads import Usage, encode_continuation, encode_prompt
from wire.process.log_limit import RepeatedLine

log = structlog.get_logger("router")


class Dispatcher:
    """Accepts requests, places them on workers and ends them.

    `request_ids` generates the ids of attempts (`router.core.state.RequestIds`).

    Attributes:
        is_draining: New requests are refused.
        rejected: The number of requests that `submit` and `check_prompt` refused, by error code.
        failovers: The number of attempts followed by another, by error code; draining: handed over.
        history: The last requests.
        open_requests: A view of the requests that have not ended, oldest first.
        observers: Notified when a request ends.  Append to this list to subscribe.
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
        self.fleet = fleet
        self._send = send
        self._clock = clock
        self._placement = Placement(fleet, index, limits=limits, request_ids=request_ids)
        self._budget = RetryBudget(limits.retry_burst, clock())
        self._replies = Replies(self, self._placement, limits=limits, clock=clock)
        self._followed = RepeatedLine(log.warning, "attempt failed, another follows", clock)
        self._handles = itertools.count(1)

        self._open: dict[int, RequestState] = {}  # by handle
        self.open_requests = self._open.values()
        self._attempts: dict[int, Attempt] = {}  # by request id
        self._waiting = Queue(limits.queue_timeout_s)
        # Requests that back off before another attempt, with the time at which to queue them.
        self._resting: list[tuple[float, RequestState]] = []

        self.rejected: Counter[str] = Counter()
        self.failovers: Counter[str] = Counter()
        self.history = History(
            fleet,
            max_records=limits.max_records,
            max_bytes=limits.max_record_bytes,
            keep_requests=limits.keep_requests,
            local_prefill=limits.local_prefill,
        )
        self.observers: list[Observer] = [self.history]

    @property
    def num_running(self) -> int:
        """The number of requests on workers, or held between two: see `end_first`."""
        return len(self._open) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a worker with capacity or for another attempt."""
        return len(self._waiting) + sum(it.handle in self._open for _, it in self._resting)

    @property
    def dropped(self) -> Counter[str]:
        """The number of dropped frames from workers, by reason."""
        return self._replies.dropped

    def check_prompt(self, num_tokens: int) -> None:
        """Raise WireError for a prompt too long for every worker, before decoding its token ids."""
        try:
            self._placement.check_tokens(num_tokens, 1)
        except WireError as error:
            self.rejected[error.code.label] += 1
            raise

    def submit(self, request: Request, sink: Sink) -> int:
        """Accept a request, whose results go to `sink`, and return its handle.

        Raises:
            WireError: The request is refused.  Nothing was sent to a worker or to `sink`.
        """
        state = begin(next(self._handles), request, sink, self._limits, self._clock())
        try:
            if self.is_draining:
                raise WireError(ErrorCode.DRAINING, "the router is shutting down")
            self._add(state)
        except WireError as error:
            self.rejected[error.code.label] += 1
            raise
        return state.handle

    def decode(self, handle: int, max_new_tokens: int) -> None:
        """Start decoding up to `max_new_tokens` for a raw TCP client.  Later calls do nothing."""
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
        self.place_waiting()

    def stop(self, handle: int) -> None:
        """End a request successfully at a stop string.  On its sink only `on_end` is called."""
        state = self._open.get(handle)
        if state is not None:
            state.is_cut = True
            self._end(state, None, usage=Usage(finish_reason="stop", kv_bytes=state.kv_bytes))
            self.place_waiting()

    def cancel(self, handle: int, code: ErrorCode = ErrorCode.CANCELLED) -> None:
        """Cancel a request.  On its sink only `on_end` is called.  Ignore an unknown handle."""
        state = self._open.get(handle)
        if state is not None:
            self._end(state, code)
            self.place_waiting()

    def cancel_all(self, code: ErrorCode, message: str) -> None:
        """End every request with this error."""
        for state in list(self._open.values()):
            self._fail(state, WireError(code, message))

    def tick(self) -> None:
        """End overdue requests, and held requests whose KV blocks others need.  Call it often."""
        self._fail_overdue()
        self.place_waiting()
        self._make_way()
        for worker in self.fleet.draining:
            self._hand_over(worker)
        self._replies.tick()
        self._followed.tick()

    def on_message(self, peer: bytes, message: Message) -> None:
        """Handle a message from a registered worker.

        Raises RemoteProtocolError for a type of message that workers do not send.  A frame that
        violates the protocol for one request fails only the attempt.
        """
        num_attempts = len(self._attempts)
        self._replies.on_message(peer, message)
        if not message.tokens or len(self._attempts) < num_attempts:
            self.place_waiting()  # tokens alone, the most frequent message, free no capacity

    def on_lost(self, peer: bytes) -> None:
        """Retry or fail the requests of a worker that is lost, restarted or stalled."""
        self._fail_worker(peer)
        self.place_waiting()

    def on_drain(self, worker: Worker) -> None:
        """Hand over the requests of a draining worker, and confirm its end when it has none."""
        self._hand_over(worker)
        self.let_go(worker)

    @property
    def missing_roles(self) -> list[Role]:
        """The roles that requests need and that have no ready worker."""
        return self._placement.missing_roles

    # Called by `router.core.replies`.

    @property
    def attempts(self) -> Mapping[int, Attempt]:
        """The attempts that have not ended, by id."""
        return self._attempts

    def is_open(self, state: RequestState) -> bool:
        """Whether the request has not ended yet."""
        return state.handle in self._open

    def go_on(self, state: RequestState) -> None:
        """Start decoding if prefill is done and the client has requested the next tokens."""
        if state.phase is not Phase.HELD or not state.is_decode_asked:
            return
        attempt, num_left = state.attempt, state.num_left
        if num_left == 0:
            self.finish_early(state, Usage(finish_reason="length"))
        elif attempt is None:  # it ended with the first token, or failed
            self._requeue(state)
        elif num_left is not None and attempt.decode is not None:
            state.phase, state.due = Phase.DECODE, state.deadline
            attempt.num_due = num_left
            if attempt.is_local:
                return  # the worker goes on by itself
            now = self._clock()
            frame = DecodeRequest(attempt.request_id, num_left)
            payload = encode_continuation(state.token_ids, attempt.options(now))
            self._send(attempt.decode.identity, frame, payload)
            if attempt.placed is not None:
                attempt.placed.asked_at = now

    def finish_early(self, state: RequestState, usage: Usage) -> None:
        """Complete a request after prefill: its first token was also its last."""
        attempt = state.attempt
        if attempt is not None and attempt.is_local:
            self.release_decode(attempt)
        elif attempt is not None and attempt.decode is None:
            self.release_prefill(attempt)  # no KV transfer: the worker is done
        self.finish(state, structs.replace(usage, kv_bytes=state.kv_bytes))

    def finish(self, state: RequestState, usage: Usage) -> None:
        """Complete a request successfully; `usage` gets the number of tokens sent to the client."""
        usage = structs.replace(usage, completion_tokens=len(state.generated))
        if self._end(state, None, usage=usage):
            try:
                state.sink.on_done(usage)
            except Exception:
                log.exception("a sink failed", **state.request.tags)

    def drop_sink(self, state: RequestState) -> None:
        """End a request whose sink raised an exception.  Call it in the except clause."""
        log.exception("a sink failed", **state.request.tags)
        self._fail(state, WireError(ErrorCode.INTERNAL, "internal error of the router"))

    def fail_attempt(
        self,
        attempt: Attempt,
        error: WireError,
        *,
        blamed: Worker | None = None,
        spare: Worker | None = None,
    ) -> None:
        """Retry after a failed attempt if possible, else end its request with `error`.

        CANCEL is sent to the attempt's workers except `spare`, a worker that has reported the
        failure itself or is gone.  The next attempt avoids the worker `blamed` if possible.
        """
        state, now = attempt.state, self._clock()
        if state.num_left == 0:  # every token was sent to the client: only DECODE_DONE is missing
            self.finish(state, Usage(finish_reason="length", kv_bytes=state.kv_bytes))
            return
        attempt.close(now, error.code.label, blamed)
        reason = no_retry(
            state, error, self._limits.max_attempts, self._placement, self._budget, now
        )
        if reason is not None:
            self._fail(state, given_up(state, error, reason), spare)
            return
        state.trouble = given_up(state, error, "no worker had room for another")
        state.avoided |= at_fault(attempt, error, blamed)
        self._abandon(attempt, ErrorCode.CANCELLED, spare)
        self.failovers[error.code.label] += 1
        cause = {"reason": error.message, "code": error.code.label}
        self._followed.add(cause, **state.request.tags)
        if state.phase is Phase.HELD:
            return  # `go_on` queues the request when DECODE_REQUEST comes
        pause = pause_s(state, error)
        if pause:
            state.phase, state.due = Phase.WAITING, state.deadline
            self._resting.append((now + pause, state))
        else:
            self._requeue(state)

    def end_first(self, attempt: Attempt) -> None:
        """End an attempt of one token; `go_on` starts the next when the client asks for more."""
        del self._attempts[attempt.request_id]
        attempt.close(self._clock(), "length")
        attempt.state.attempt = None
        attempt.state.num_attempts -= 1
        self.release_prefill(attempt)

    def release_prefill(self, attempt: Attempt) -> None:
        """Remove the attempt from its prefill worker, which has finished with it."""
        worker = self._placement.release_prefill(attempt)
        if worker is not None:
            self.let_go(worker)

    def release_decode(self, attempt: Attempt) -> None:
        """Remove the attempt from its decode worker, which has finished with it."""
        worker = self._placement.release_decode(attempt)
        if worker is not None:
            self.let_go(worker)

    def let_go(self, worker: Worker) -> None:
        """Reply to DRAIN if the worker is draining and has no attempts left."""
        if worker.state is WorkerState.DRAINING and not worker.attempts:
            self._send(worker.identity, Drain(worker.epoch, 0))

    def _add(self, state: RequestState) -> None:
        """Place a request or queue it.

        Raises:
            WireError: The request can never be served, or the queue is full (OVERLOADED, or
                NO_WORKER if there is no worker).
        """
        self._placement.check(state)
        if self._waiting.is_behind(state) or not self._place(state):
            self._placement.check_workers(state, self._clock())
            self._make_room(state)
            self._waiting.add(state)
            self.history.on_waiting(state)
        self._open[state.handle] = state
        self._budget.earn()

    def _requeue(self, state: RequestState) -> None:
        """Queue a request for another attempt, ahead of requests that were never placed."""
        state.phase = Phase.WAITING
        state.due = min(state.deadline, self._clock() + self._limits.queue_timeout_s)
        self._waiting.add_first(state)

    def place_waiting(self) -> None:
        """Place waiting requests while workers have capacity: after one joined, or freed blocks."""
        if self._resting:
            self._wake()
        while (state := self._waiting.first()) is not None and self._place(state):
            self._waiting.take(state, self._clock())

    def _make_way(self) -> None:
        """Place waiting requests, ending held ones past their grace period if blocks are needed."""
        while (state := self._waiting.first()) is not None:
            if self._place(state):
                self._waiting.take(state, self._clock())
                continue
            giving = self._placement.give_way(state, giving_way(self._parked(), self._clock()))
            if not giving:
                return
            for each in giving:
                self._fail(each, gave_way())

    def _end(
        self,
        state: RequestState,
        code: ErrorCode | None,
        *,
        usage: Usage | None = None,
        spare: Worker | None = None,
    ) -> bool:
        """Remove a request from the table and notify its sink and the observers.

        Return False if the request had already ended.  CANCEL is sent to its workers except
        `spare`, a worker that has ended it itself or is gone.
        """
        if self._open.pop(state.handle, None) is None:
            return False
        self._waiting.remove(state)
        end = state.end(now := self._clock(), code, usage)
        if (attempt := state.attempt) is not None:
            attempt.close(now, end.outcome)
            self._abandon(attempt, code or ErrorCode.CANCELLED, spare)
        for observer in self.observers:
            observer.on_request_end(end)
        state.sink.on_end(end)
        return True

    def _fail(self, state: RequestState, error: WireError, spare: Worker | None = None) -> None:
        if self._end(state, error.code, spare=spare):
            try:
                state.sink.on_error(error)
            except Exception:
                log.exception("a sink failed", **state.request.tags)

    def _fail_worker(self, peer: bytes) -> None:
        """Fail every attempt on a worker that is lost, restarted or stalled."""
        is_here = self.fleet.get(peer) is not None
        for attempt in tuple(self._attempts.values()):
            for worker in (attempt.prefill, attempt.decode):
                if worker is not None and worker.identity == peer:
                    # A worker that is still connected may be computing the attempt: send CANCEL.
                    spare = None if is_here else worker
                    attempt.close(self._clock(), ErrorCode.WORKER_LOST.label, worker)
                    self.fail_attempt(attempt, PeerLost(worker.name), spare=spare)
                    break

    def _fail_overdue(self) -> None:
        """Fail requests that are overdue or wait for a worker that does not come back."""
        now = self._clock()
        if self._placement.has_lost_role(now):
            for state in [it for it in self._open.values() if it.phase is Phase.WAITING]:
                if missing := self._placement.missing_worker(state):
                    self._fail(state, state.trouble or missing)
        for state in [state for state in self._open.values() if state.due <= now]:
            self._fail(state, state.overdue(now))

    def _place(self, state: RequestState) -> bool:
        """Start an attempt; return False if no worker has capacity."""
        now = self._clock()
        attempt = self._placement.place(state, now)
        if attempt is None:
            return False
        state.num_attempts += 1
        self._start(attempt, now)
        return True

    def _hand_over(self, worker: Worker) -> None:
        """Move answers from a draining worker, which sends the KV, to others with capacity."""
        now = self._clock()
        for attempt in [self._attempts[request_id] for request_id in worker.attempts]:
            state = attempt.state
            is_decoding = attempt.decode is worker and state.phase is Phase.DECODE
            if not is_decoding or state.num_left == 0:  # only DECODE_DONE is missing
                continue
            successor = self._placement.place(state, now, leaving=worker)
            if successor is None:
                continue
            self.failovers[ErrorCode.DRAINING.label] += 1
            attempt.close(now, ErrorCode.DRAINING.label, worker)
            self._abandon(attempt, ErrorCode.CANCELLED, None)
            self._start(successor, now)

    def _start(self, attempt: Attempt, now: float) -> None:
        """Send a placed attempt to the worker that does its prefill."""
        state = attempt.state
        self._attempts[attempt.request_id] = state.attempt = attempt
        state.phase, state.due = Phase.PREFILL, state.deadline
        state.placed_at = state.placed_at or now
        self.history.on_waiting(state)  # so that `options` asks for a timeline
        rank = NO_RANK if attempt.decode is None else attempt.decode.rank
        payload = encode_prompt(state.token_ids, attempt.options(now))
        frame = PrefillRequest(attempt.request_id, attempt.seq_len, rank)
        self._send(attempt.prefiller.identity, frame, payload)
        self.history.on_placed(attempt, payload, now)

    def _parked(self) -> list[RequestState]:
        return [it.state for it in self._attempts.values() if it.state.is_parked]

    def _make_room(self, state: RequestState) -> None:
        """If the queue is full, drop a request of a heavier client, or raise WireError."""
        if len(self._waiting) < self._limits.max_waiting:
            return
        message = f"{len(self._waiting)} requests are waiting for a worker already; try later"
        overloaded = WireError(ErrorCode.OVERLOADED, message)
        held = Counter(each.request.client for each in self._parked())
        displaced = self._waiting.displaced_by(state, held)
        if displaced is None:
            raise self._placement.missing_worker(state) or overloaded
        self._fail(displaced, self._placement.missing_worker(displaced) or overloaded)

    def _wake(self) -> None:
        now = self._clock()
        rested = [it for at, it in self._resting if at <= now and self.is_open(it)]
        self._resting = [entry for entry in self._resting if entry[0] > now]
        for state in rested:
            self._requeue(state)

    def _abandon(self, attempt: Attempt, code: ErrorCode, spare: Worker | None) -> None:
        """Remove an attempt and send CANCEL to its workers except `spare`."""
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
