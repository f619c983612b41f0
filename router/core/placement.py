"""Places requests on workers, releases them, and keeps the request counts of each worker.

`check` refuses requests that can never be served, `check_workers` those too large for any current
worker.  `place` picks a prefill and a decode worker (`router.core.policy`) and counts the attempt
on them; only `release_prefill` and `release_decode` undo that.  This module does no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache

from router.core.estimates import Mean
from router.core.fleet import Fleet, Worker
from router.core.policy import (
    UNKNOWN_NEW_TOKENS,
    Choice,
    Prompt,
    blocks_to_promise,
    can_decode,
    can_ever_fit,
    can_prefill,
    choose,
    num_blocks,
)
from router.core.prefixes import PrefixIndex
from router.core.state import Attempt, Limits, RequestState, no_worker
from wire.errors import ErrorCode, TransferTooLarge, WireError
from wire.frames import Role
from wire.layout import KVLayout
from wire.logprobs import prompt_logprobs_problem
from wire.payloads import Usage


class Placement:
    """Chooses workers and updates their counts; `request_ids` generates the ids of attempts."""

    def __init__(
        self, fleet: Fleet, index: PrefixIndex, *, limits: Limits, request_ids: Iterator[int]
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._max_running = limits.max_running_per_worker
        self._rejoin_s = limits.rejoin_s
        self._had_all_roles_at: float | None = None  # when none last lacked a ready worker
        self._local_prefill = limits.local_prefill
        self._vocab_size = limits.vocab_size
        self._request_ids = request_ids
        # Tokens: of an answer; of a prompt, those that its prefill worker had cached or read.
        self._answer, self._cached, self._read = Mean(UNKNOWN_NEW_TOKENS), Mean(), Mean()

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
        """Check that workers of the roles that a request needs have enough KV blocks in total.

        Raises:
            WireError: NO_WORKER or OUT_OF_BLOCKS; OVERLOADED for a replay, because it would hold up
                requests that may be served by more workers.
        """
        if state.request.excluded is not None:
            raise WireError(
                ErrorCode.OVERLOADED,
                "a replay does not wait, and no worker that may serve it has room; try again",
            )
        if state.num_left == 1:
            prefills = self._fleet.staying(Role.PREFILL)
            if any(can_ever_fit(worker, state.seq_len) for worker in prefills):
                return
        if not self._local_prefill:
            self._check_role(Role.PREFILL, state.seq_len, now)
        if self._local_prefill or state.num_left != 1:
            self._check_role(Role.DECODE, state.seq_len, now)

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
                f"{wanted} more are asked for, {seq_len + wanted} in all; "
                + ("shorten the prompt" if seq_len >= limit else "lower max_tokens"),
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

    def place(
        self, state: RequestState, now: float, leaving: Worker | None = None
    ) -> Attempt | None:
        """Choose workers and count an attempt there; return None if there is no capacity now.

        `leaving` is a draining worker that has the request's KV: it may do the prefill.
        """
        # Capacity is checked before the prefix index: a waiting request is tried often.
        decodes = self._free_decodes(state)
        if not decodes and state.num_left != 1:
            return None
        prefills = self._free_prefills(state)
        if leaving is not None:
            prefills.append(leaving)
        if not prefills and not self._local_prefill:
            return None
        prompt = self._prompt(state, now)
        choice = self._choose(prefills, decodes, prompt)
        if choice is None:
            return None
        prefill, decode = choice
        attempt = Attempt(
            next(self._request_ids),
            state,
            prefill,
            decode,
            len(state.generated),
            is_local=prefill is None,
            held=prompt.held,
            free=(*prefills, *decodes),
        )
        if attempt.is_local:
            has_choice = any(worker is not decode for worker in prefills)
            state.local_reasons.append("cost" if has_choice else "no_prefill_worker")
        if decode is not None:
            state.arithmetic = state.arithmetic or decode.detail.arithmetic
            self._count_decode(attempt, decode, prompt)
        self._count_prefill(attempt, prompt)
        return attempt

    @property
    def missing_roles(self) -> list[Role]:
        """The roles that requests need and that have no ready worker."""
        needed = (Role.DECODE,) if self._local_prefill else (Role.PREFILL, Role.DECODE)
        return [role for role in needed if not self._fleet.ready(role)]

    def has_lost_role(self, now: float) -> bool:
        """Whether a role has had no ready worker for longer than one may take to come back.

        Call it often: the time counts from the last call at which all roles had one.
        """
        if self._had_all_roles_at is None or not self.missing_roles:
            self._had_all_roles_at = now
        return now - self._had_all_roles_at >= self._rejoin_s

    def missing_worker(self, state: RequestState) -> WireError | None:
        """Return the error of a request for which no worker of a role is ready, if so."""
        missing = self.missing_roles
        if not missing or (state.num_left == 1 and self._fleet.ready(Role.PREFILL)):
            return None
        return no_worker(missing[0])

    def _choose(
        self, prefills: list[Worker], decodes: list[Worker], prompt: Prompt
    ) -> Choice | None:
        """Choose among workers that have capacity; other policies replace this."""
        return choose(prefills, decodes, prompt)

    def _free_prefills(self, state: RequestState) -> list[Worker]:
        """Return the prefill workers that have capacity for the request now."""
        return [
            worker
            for worker in self._candidates(Role.PREFILL, state)
            if can_prefill(worker, state.seq_len, self._max_running)
        ]

    def _free_decodes(self, state: RequestState) -> list[Worker]:
        """Return the decode workers that have capacity for the request now."""
        if state.num_left == 1 and not self._local_prefill:
            return []  # only a prefill worker is needed
        return [
            worker
            for worker in self._candidates(Role.DECODE, state)
            if can_decode(worker, state.seq_len, state.num_more, self._max_running)
        ]

    def learn(self, worker: Worker, usage: Usage) -> None:
        """Update the mean answer length and the cost of transfers to the worker."""
        self._answer.add(usage.completion_tokens)
        if usage.kv_transfer_seconds and usage.kv_bytes:
            worker.transfers.add(usage.kv_bytes, usage.kv_transfer_seconds)

    def _prompt(self, state: RequestState, now: float) -> Prompt:
        """Return the properties of a request that its placement depends on."""
        held: dict[bytes, int] = {}
        for size in self._fleet.block_sizes:
            for identity, count in self._index.matches(state.hashes(size)).items():
                worker = self._fleet.get(identity)
                if worker is not None and worker.detail.block_size == size:
                    held[identity] = count * size
        new_tokens, num_tokens = state.num_more, state.seq_len
        answer_tokens = self._answer.value or 0.0
        if new_tokens is not None:
            answer_tokens = min(answer_tokens, new_tokens)
        return Prompt(
            now=now,
            num_tokens=num_tokens,
            held=held,
            arithmetic=state.arithmetic,
            new_tokens=new_tokens,
            is_decode_asked=state.is_decode_asked,
            answer_tokens=answer_tokens,
            kv_bytes=self._transfer_bytes(state) / num_tokens,
            local_prefill=self._local_prefill,
            reuse=(self._cached.value or 0.0) / (self._read.value or 1.0),
        )

    def _count_prefill(self, attempt: Attempt, prompt: Prompt) -> None:
        worker = attempt.prefiller
        if worker is attempt.prefill:
            worker.attempts.add(attempt.request_id)
            worker.num_active += 1
        if not worker.num_in_prefill:
            worker.prefill_since = prompt.now
        worker.num_in_prefill += 1
        if worker is attempt.prefill and worker.can(Role.DECODE):
            blocks = blocks_to_promise(worker, prompt.num_tokens, 0)
            worker.promise(attempt.request_id, blocks)
        attempt.num_to_prefill = prompt.missing(worker)
        worker.prefill_tokens += attempt.num_to_prefill
        self._index.store(worker.identity, attempt.state.hashes(worker.detail.block_size))

    def _count_decode(self, attempt: Attempt, worker: Worker, prompt: Prompt) -> None:
        worker.attempts.add(attempt.request_id)
        worker.num_active += 1
        blocks = blocks_to_promise(worker, prompt.num_tokens, prompt.new_tokens)
        worker.promise(attempt.request_id, blocks)
        self._index.store(worker.identity, attempt.state.hashes(worker.detail.block_size))

    def give_way(self, state: RequestState, parked: Iterable[RequestState]) -> list[RequestState]:
        """Return which of `parked` the caller must end so that `state` can be placed.

        The requests are considered in order.  Return an empty list if ending them would not
        suffice, or if enough blocks are being freed already and the next heartbeat will show it.
        """
        seq_len, new_tokens = state.seq_len, state.num_more
        workers = {
            worker.identity: worker
            for worker in self._candidates(Role.DECODE, state)
            if can_ever_fit(worker, seq_len)
        }
        is_alone = self._local_prefill or any(it.role is Role.ANY for it in workers.values())
        if not is_alone and not self._free_prefills(state):
            return []
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
        excluded = state.request.excluded or ()
        workers = [
            worker
            for worker in self._fleet.ready(role)
            if num_tokens <= worker.detail.max_model_len
            and kv_bytes <= worker.detail.max_kv_transfer_bytes
            and worker.identity not in excluded
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

    def on_prefill_done(self, attempt: Attempt, cached_tokens: int, now: float) -> None:
        """Record a PREFILL_DONE: `cached_tokens` were cached, and the rest was prefilled."""
        if attempt.is_in_prefill:
            attempt.prefiller.prefill_since = now
            self._cached.add(cached_tokens)
            self._read.add(attempt.seq_len - cached_tokens)
            self._correct(attempt, attempt.prefiller, cached_tokens)
            self.finish_prefill(attempt)

    def finish_prefill(self, attempt: Attempt) -> None:
        """Stop counting the attempt's prompt as not yet prefilled.  Idempotent."""
        if attempt.is_in_prefill:
            prefiller = attempt.prefiller
            attempt.is_in_prefill = False
            prefiller.num_active -= prefiller is attempt.prefill
            prefiller.num_in_prefill -= 1
            prefiller.prefill_tokens -= attempt.num_to_prefill
            for worker in (attempt.prefill, attempt.decode):
                if worker is not None:
                    worker.settle(attempt.request_id)

    def _correct(self, attempt: Attempt, worker: Worker, cached_tokens: int) -> None:
        """Remove a prompt from the index if the worker had cached less of it than expected.

        Its prefix cache may be disabled.  Heartbeats report the blocks that it has.
        """
        size = worker.detail.block_size
        if attempt.seq_len - cached_tokens >= attempt.num_to_prefill + size:
            self._index.evict(worker.identity, attempt.state.hashes(size))

    def release_prefill(self, attempt: Attempt) -> Worker | None:
        """Remove the attempt from its prefill worker and return that worker.  Idempotent."""
        worker = attempt.prefill
        if worker is not None:
            self.finish_prefill(attempt)
            worker.attempts.discard(attempt.request_id)
            worker.unpromise(attempt.request_id)
            attempt.prefill = None
        return worker

    def release_decode(self, attempt: Attempt) -> Worker | None:
        """Remove the attempt from its decode worker and return that worker.  Idempotent."""
        worker = attempt.decode
        if worker is not None:
            if attempt.is_local:
                self.finish_prefill(attempt)
            worker.attempts.discard(attempt.request_id)
            worker.num_active -= 1
            worker.unpromise(attempt.request_id)
            attempt.decode = None
        return worker

    def _transfer_bytes(self, state: RequestState) -> int:
        """Return the maximum size of the KV that a request's decode worker receives, in bytes."""
        if state.num_left == 1:
            return 0
        layout = self._fleet.layout
        return 0 if layout is None else _transfer_bytes(layout, state.seq_len)

    def _check_role(self, role: Role, seq_len: int, now: float) -> None:
        """Check that a worker of this role has enough KV blocks in total."""
        workers = self._fleet.staying(role)
        if not workers and self.has_lost_role(now):
            raise no_worker(role)
        if workers and not any(can_ever_fit(worker, seq_len) for worker in workers):
            raise WireError(
                ErrorCode.OUT_OF_BLOCKS,
                f"no worker that can {role.name.lower()} has KV blocks for {seq_len + 1} tokens; "
                "shorten the prompt or raise --num-blocks of the workers",
            )


@lru_cache(maxsize=1024)
def _transfer_bytes(layout: KVLayout, num_tokens: int) -> int:
    """Return `layout.transfer_bytes(num_tokens)`; cached, as a placement needs it repeatedly."""
    return layout.transfer_bytes(num_tokens)
