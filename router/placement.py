"""Puts flights on workers and takes them off again: admission, choice, and the books.

`check` refuses what can never be served, before anything is sent; `place` picks the workers by
`router.policy` and charges them; `release_*` are the only ways off the books.  Pure.
"""

from __future__ import annotations

import itertools

from router.fleet import Fleet
from router.flight import Attempt, Flight, Limits, no_worker
from router.index import PrefixIndex
from router.policy import can_ever_fit, pick_decode, pick_prefill
from router.worker import Worker
from wire.errors import ErrorCode, TransferTooLarge, WireError
from wire.frames import Role
from wire.logprobs import prompt_logprobs_problem


class Placement:
    """Which attempt is on which worker.  `router_epoch` fills the upper half of request ids."""

    def __init__(
        self, fleet: Fleet, index: PrefixIndex, *, limits: Limits, router_epoch: int
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._max_running = limits.max_running_per_worker
        self._request_ids = itertools.count((router_epoch << 32) + 1)

    def check(self, flight: Flight, now: float) -> None:
        """Refuse what no worker here can ever serve.

        Raises:
            WireError: INVALID_REQUEST, CONTEXT_LENGTH_EXCEEDED, KV_TRANSFER_TOO_LARGE, NO_WORKER
                or OUT_OF_BLOCKS.
        """
        options = flight.request.options
        seq_len = len(flight.token_ids)
        if seq_len == 0:
            raise WireError(ErrorCode.INVALID_REQUEST, "the prompt has no tokens")
        if options.generated_tokens:
            raise WireError(
                ErrorCode.INVALID_REQUEST,
                f"generated_tokens is {options.generated_tokens}: only a router sets it; leave it "
                "out",
            )
        problem = prompt_logprobs_problem(seq_len, options.prompt_logprobs)
        if problem is not None:
            raise WireError(ErrorCode.INVALID_REQUEST, problem)
        self.check_length(flight)
        is_handed_over = flight.num_left != 1
        layout = self._fleet.layout
        if layout is not None and is_handed_over:
            size, limit = seq_len * layout.token_bytes, self._fleet.max_kv_transfer_bytes
            if size > limit:
                raise TransferTooLarge(size, limit)
        self._check_role(Role.PREFILL, seq_len, now)
        if is_handed_over:
            self._check_role(Role.DECODE, seq_len, now)

    def check_length(self, flight: Flight) -> None:
        """Refuse more tokens than the model's context has.

        Raises:
            WireError: CONTEXT_LENGTH_EXCEEDED.
        """
        self.check_tokens(len(flight.request.token_ids), 1 + (flight.new_tokens or 0))

    def check_tokens(self, seq_len: int, wanted: int) -> None:
        """The same, of a prompt's length and the tokens wanted after it.

        Raises:
            WireError: CONTEXT_LENGTH_EXCEEDED.
        """
        limit = self._fleet.last_max_model_len
        if limit is not None and seq_len + wanted > limit:
            raise WireError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the model's context length is {limit} tokens; the prompt has {seq_len} and "
                f"{wanted} more are asked for, {seq_len + wanted} in all",
            )

    def place(self, flight: Flight) -> Attempt | None:
        """Choose workers and charge them; None when there is no room now."""
        num_left = flight.num_left
        token_ids = flight.token_ids
        prefill = pick_prefill(
            self._candidates(Role.PREFILL, flight), len(token_ids), self._max_running
        )
        if prefill is None:
            return None
        if num_left == 1:
            attempt = Attempt(next(self._request_ids), flight, prefill, None, len(flight.generated))
        else:
            choice = pick_decode(
                self._candidates(Role.DECODE, flight),
                token_ids,
                None if num_left is None else num_left - 1,
                self._index,
                self._max_running,
            )
            if choice is None:
                return None
            decode = choice.worker
            attempt = Attempt(
                next(self._request_ids), flight, prefill, decode, len(flight.generated)
            )
            decode.attempts.add(attempt.request_id)
            decode.num_active += 1
            decode.promise(attempt.request_id, choice.num_blocks)
            self._index.store(decode.identity, choice.hashes)
        prefill.attempts.add(attempt.request_id)
        prefill.num_active += 1
        prefill.prompt_tokens += attempt.seq_len
        return attempt

    def _candidates(self, role: Role, flight: Flight) -> list[Worker]:
        """Ready workers; those that failed this flight only if no other could ever serve it."""
        workers = self._fleet.ready(role)
        if not flight.avoided:
            return workers
        seq_len = len(flight.token_ids)
        others = [
            worker
            for worker in workers
            if worker.identity not in flight.avoided and can_ever_fit(worker, seq_len)
        ]
        return others or workers

    def finish_reading(self, attempt: Attempt) -> None:
        """PREFILL_DONE came, or never will: the prompt weighs on its worker no more."""
        if attempt.is_reading:
            assert attempt.prefill is not None
            attempt.is_reading = False
            attempt.prefill.num_active -= 1
            attempt.prefill.prompt_tokens -= attempt.seq_len
            if attempt.decode is not None:
                attempt.decode.settle(attempt.request_id)

    def release_prefill(self, attempt: Attempt) -> Worker | None:
        """Take the attempt off its prefill worker; idempotent; returns that worker."""
        worker = attempt.prefill
        if worker is not None:
            self.finish_reading(attempt)
            worker.attempts.discard(attempt.request_id)
            attempt.prefill = None
        return worker

    def release_decode(self, attempt: Attempt) -> Worker | None:
        """Take the attempt off its decode worker; idempotent; returns that worker."""
        worker = attempt.decode
        if worker is not None:
            worker.attempts.discard(attempt.request_id)
            worker.num_active -= 1
            worker.unpromise(attempt.request_id)
            attempt.decode = None
        return worker

    def _check_role(self, role: Role, seq_len: int, now: float) -> None:
        workers = self._fleet.expected(role, now)
        if not workers:
            raise no_worker(role)
        if not any(can_ever_fit(worker, seq_len) for worker in workers):
            raise WireError(
                ErrorCode.OUT_OF_BLOCKS,
                f"no {role.name.lower()} worker has KV blocks for {seq_len + 1} tokens; "
                "shorten the prompt or raise --num-blocks of the workers",
            )
