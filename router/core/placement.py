"""Places requests on workers, releases them, and keeps the request counts of each worker.

`check` refuses requests that can never be served, `check_workers` those too large for any current
worker.  `place` picks a prefill and a decode worker (`router.core.policy`) and counts the attempt
on them; only `release_prefill` and `release_decode` undo that.  This module does no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from router.core.fleet import Fleet, Worker
from router.core.policy import (
    PrefixIndex,
    blocks_to_promise,
    can_ever_fit,
    num_blocks,
    pick_decode,
    pick_prefill,
)
from router.core.state import Attempt, Limits, RequestState, no_worker
from wire.errors import ErrorCode, TransferTooLarge, WireError
from wire.frames import Role
from wire.logprobs import prompt_logprobs_problem


class Placement:
    """Chooses workers and updates their counts; `request_ids` generates the ids of attempts."""

    def __init__(
        self, fleet: Fleet, index: PrefixIndex, *, limits: Limits, request_ids: Iterator[int]
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._max_running = limits.max_running_per_worker
        self._vocab_size = limits.vocab_size
        self._request_ids = request_ids

    def check(self, state: RequestState) -> None:
        """Check that a request can be served at all.

        Raises:
            WireError: INVALID_REQUEST, CONTEXT_LENGTH_EXCEEDED or KV_TRANSFER_TOO_LARGE.
        """
        options = state.request.options
        seq_len = state.seq_len
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
        # Checked before `max`, which is slow for a very long prompt.
        self.check_length(state)
        if (largest := max(state.request.token_ids)) >= self._vocab_size:
            raise WireError(
                ErrorCode.INVALID_REQUEST,
                f"token id {largest} is not in the model's vocabulary, 0 to {self._vocab_size - 1}",
            )
        size, limit = self._transfer_bytes(state), self._fleet.max_kv_transfer_bytes
        if size > limit:
            raise TransferTooLarge(size, limit)

    def check_workers(self, state: RequestState, now: float) -> None:
        """Check that a worker of each role has enough KV blocks in total for a request.

        Raises:
            WireError: NO_WORKER or OUT_OF_BLOCKS.
        """
        seq_len = state.seq_len
        self._check_role(Role.PREFILL, seq_len, now)
        if state.num_left != 1:
            self._check_role(Role.DECODE, seq_len, now)

    def check_length(self, state: RequestState) -> None:
        """Check the length of a request; see `check_tokens`."""
        seq_len = len(state.request.token_ids)
        self.check_tokens(seq_len, state.total_tokens - seq_len)

    def check_tokens(self, seq_len: int, wanted: int) -> None:
        """Check that `seq_len` prompt tokens and `wanted` generated ones fit the context length.

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

    def num_that_fit(self, state: RequestState) -> int:
        """Return the number of tokens after the first that fit the model's context.

        Raises:
            WireError: NO_WORKER, if no worker has reported the context length yet.
        """
        limit = self._fleet.last_max_model_len
        if limit is None:
            raise no_worker(Role.PREFILL)
        return max(0, limit - len(state.request.token_ids) - 1)

    def place(self, state: RequestState) -> Attempt | None:
        """Choose workers and count a new attempt on them; None if no worker has capacity now."""
        num_left = state.num_left
        token_ids = state.token_ids
        prefill = pick_prefill(
            self._candidates(Role.PREFILL, state),
            len(token_ids),
            self._max_running,
            state.arithmetic,
        )
        if prefill is None:
            return None
        if num_left == 1:
            attempt = Attempt(next(self._request_ids), state, prefill, None, len(state.generated))
        else:
            choice = pick_decode(
                self._candidates(Role.DECODE, state),
                token_ids,
                None if num_left is None else num_left - 1,
                self._index,
                self._max_running,
                state.arithmetic,
            )
            if choice is None:
                return None
            decode = choice.worker
            state.arithmetic = state.arithmetic or decode.detail.arithmetic
            attempt = Attempt(next(self._request_ids), state, prefill, decode, len(state.generated))
            decode.attempts.add(attempt.request_id)
            decode.num_active += 1
            decode.promise(attempt.request_id, choice.num_blocks)
            self._index.store(decode.identity, choice.hashes)
        prefill.attempts.add(attempt.request_id)
        prefill.num_active += 1
        prefill.prompt_tokens += attempt.seq_len
        return attempt

    def give_way(self, state: RequestState, parked: Iterable[RequestState]) -> list[RequestState]:
        """Return which of `parked` the caller must end so that `state` can be placed.

        The requests are considered in order.  Return an empty list if ending them would not
        suffice, or if enough blocks are being freed already and the next heartbeat will show it.
        """
        seq_len, num_left = state.seq_len, state.num_left
        prefills = self._candidates(Role.PREFILL, state)
        if pick_prefill(prefills, seq_len, self._max_running) is None:
            return []
        workers = {
            worker.identity: worker
            for worker in self._candidates(Role.DECODE, state)
            if can_ever_fit(worker, seq_len)
        }
        new_tokens = None if num_left is None else num_left - 1
        giving: dict[bytes, list[RequestState]] = {identity: [] for identity in workers}
        # Blocks that would be freed by worker: reserved ones at once, allocated ones later.
        promised, held = Counter[bytes](), Counter[bytes]()

        def has_room(worker: Worker) -> bool:
            key = worker.identity
            coming = promised[key] + held[key] + worker.returning_blocks
            return (
                worker.num_active - len(giving[key]) < self._max_running
                and blocks_to_promise(worker, seq_len, new_tokens)
                <= worker.available_blocks + coming
            )

        if any(map(has_room, workers.values())):
            return []
        for each in parked:
            assert each.attempt is not None and each.attempt.decode is not None
            key, request_id = each.attempt.decode.identity, each.attempt.request_id
            if (worker := workers.get(key)) is None:
                continue
            giving[key].append(each)
            if request_id in worker.promised:
                promised[key] += worker.promised[request_id]
            else:
                held[key] += num_blocks(each.attempt.seq_len, worker.detail.block_size)
            if has_room(worker):
                worker.returning_blocks += held[key]
                return giving[key]
        return []

    def _candidates(self, role: Role, state: RequestState) -> list[Worker]:
        """Return the ready workers whose limits allow this request.

        Workers on which the request failed are excluded unless no other worker could serve it.
        """
        num_tokens, kv_bytes = state.total_tokens, self._transfer_bytes(state)
        workers = [
            worker
            for worker in self._fleet.ready(role)
            if num_tokens <= worker.detail.max_model_len
            and kv_bytes <= worker.detail.max_kv_transfer_bytes
        ]
        if not state.avoided:
            return workers
        seq_len = state.seq_len
        others = [
            worker
            for worker in workers
            if worker.identity not in state.avoided and can_ever_fit(worker, seq_len)
        ]
        return others or workers

    def finish_reading(self, attempt: Attempt) -> None:
        """Stop counting the attempt's prompt as not yet prefilled.  Idempotent."""
        if attempt.is_reading:
            assert attempt.prefill is not None
            attempt.is_reading = False
            attempt.prefill.num_active -= 1
            attempt.prefill.prompt_tokens -= attempt.seq_len
            if attempt.decode is not None:
                attempt.decode.settle(attempt.request_id)

    def release_prefill(self, attempt: Attempt) -> Worker | None:
        """Remove the attempt from its prefill worker and return that worker.  Idempotent."""
        worker = attempt.prefill
        if worker is not None:
            self.finish_reading(attempt)
            worker.attempts.discard(attempt.request_id)
            attempt.prefill = None
        return worker

    def release_decode(self, attempt: Attempt) -> Worker | None:
        """Remove the attempt from its decode worker and return that worker.  Idempotent."""
        worker = attempt.decode
        if worker is not None:
            worker.attempts.discard(attempt.request_id)
            worker.num_active -= 1
            worker.unpromise(attempt.request_id)
            attempt.decode = None
        return worker

    def _transfer_bytes(self, state: RequestState) -> int:
        """Return the maximum size of the KV that a request's decode worker receives, in bytes."""
        layout = self._fleet.layout
        return 0 if layout is None or state.num_left == 1 else layout.transfer_bytes(state.seq_len)

    def _check_role(self, role: Role, seq_len: int, now: float) -> None:
        """Check that a worker of this role has enough KV blocks in total."""
        workers = self._fleet.expected(role, now)
        if not workers:
            raise no_worker(role)
        if not any(can_ever_fit(worker, seq_len) for worker in workers):
            raise WireError(
                ErrorCode.OUT_OF_BLOCKS,
                f"no {role.name.lower()} worker has KV blocks for {seq_len + 1} tokens; "
                "shorten the prompt or raise --num-blocks of the workers",
            )
