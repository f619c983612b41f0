"""A sequence: the tokens of one request, their KV blocks, and its status."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from enum import StrEnum
from functools import cache
from struct import Struct
from typing import Final

from wire.errors import ErrorCode, LocalProtocolError
from wire.logprobs import prompt_logprobs_problem
from wire.options import Options
from worker.engine.blocks import ROOT, BlockPool, Place, Prefix
from worker.engine.outputs import FinishReason
from worker.executor.batch import PromptScores
from worker.executor.contract import ModelInfo
from worker.executor.structured_output import Structured
from worker.executor.token_counts import Occurrences

# A sequence without a limit ends at the model's context length.
UNLIMITED: Final = 2**31 - 1
# The most drafts of a sequence in one step (`worker.engine.speculation`).
MAX_DRAFTS: Final = 64
# Why a request is refused: the code, and the message for the client.
Problem = tuple[ErrorCode, str]


@cache
def _packer(block_size: int) -> Callable[..., bytes]:
    return Struct(f"<{block_size}I").pack


class Status(StrEnum):
    """The life cycle of a sequence on this worker."""

    WAITING = "waiting"  # no blocks; new, or preempted
    RUNNING = "running"  # has blocks; is prefilled or generates
    HANDING_OVER = "handing_over"  # prefill role: computed, blocks kept until the release
    RESERVING = "reserving"  # decode role: waits for blocks
    RESERVED = "reserved"  # decode role: has blocks into which KV arrives
    FINISHED = "finished"


TRANSITIONS: Final[dict[Status, frozenset[Status]]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.HANDING_OVER, Status.FINISHED}),
    Status.HANDING_OVER: frozenset({Status.FINISHED}),
    Status.RESERVING: frozenset({Status.RESERVED, Status.FINISHED}),
    Status.RESERVED: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class Sequence:
    """The tokens of one request and this worker's progress with them.

    `max_new_tokens` limits the tokens generated here.  With `transfer` it is the request's whole
    limit, though only the first token is generated here; the blocks are then kept until their KV
    has been sent.
    """

    __slots__ = (
        "arrival",
        "arrival_s",
        "block_keys",
        "block_table",
        "deadline_s",
        "draft_window",
        "drafts",
        "is_claimed",
        "is_ready",
        "is_released",
        "max_len",
        "max_new_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_given_tokens",
        "num_preemptions",
        "num_registered_blocks",
        "occurrences",
        "offered_by",
        "options",
        "prefix",
        "prompt_len",
        "request_id",
        "scores",
        "slot",
        "started_s",
        "state_block",
        "status",
        "stop_ids",
        "structured",
        "token_ids",
        "transfer",
        "whole_from",
        "window_end",
        "window_start",
    )

    def __init__(
        self,
        request_id: int,
        token_ids: Iterable[int],
        options: Options | None = None,
        max_new_tokens: int | None = None,
        *,
        transfer: bool = False,
        offered_by: str = "",
        status: Status = Status.WAITING,
    ) -> None:
        # The request.
        self.request_id = request_id
        self.token_ids = list(token_ids)
        # Tokens that an earlier attempt generated count as output for limits and penalties.
        self.prompt_len = len(self.token_ids) - (options.generated_tokens if options else 0)
        self.num_given_tokens = len(self.token_ids)
        self.transfer = transfer
        self.offered_by = offered_by  # the prefill worker that sends the KV of a reservation
        self.stop_ids: frozenset[int] = frozenset()
        self.scores: PromptScores | None = None
        self.ask(options or Options(), max_new_tokens)
        if self.options.prompt_logprobs is not None:
            self.scores = PromptScores(self.prompt_len, self.options.prompt_logprobs)
        # Progress, kept until the end.
        self.status = status
        self.arrival = 0
        self.arrival_s = 0.0
        self.deadline_s: float | None = None
        self.started_s: float | None = None
        self.is_claimed = False  # a router has requested this reservation
        self.is_released = False
        self.num_preemptions = 0
        self.block_keys: list[bytes] = []
        self.draft_window = MAX_DRAFTS
        self.drafts: tuple[int, ...] = ()  # guesses of the next tokens, until one is appended
        # Blocks, and what comes with them; lost on preemption.
        self.block_table = array("i")  # the physical blocks, in order
        self.slot: int | None = None
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.num_registered_blocks = 0
        self.prefix: Prefix = ROOT
        self.state_block: int | None = None  # the block whose state the next step reads
        self.whole_from = 0  # layers with a window have no KV before this token
        # The range of the table that it reaches in layers with a window.
        self.window_start = self.window_end = 0

    def arrive(self, arrival: int, now: float) -> None:
        """Set the place in the order of arrival, and the deadline."""
        self.arrival, self.arrival_s = arrival, now
        self.set_deadline(now)

    def set_deadline(self, now: float) -> None:
        if self.options.deadline_ms is not None:
            self.deadline_s = now + self.options.deadline_ms / 1000

    def ask(self, options: Options, max_new_tokens: int | None) -> None:
        """Set the options and the limit, by default the rest of the options' limit."""
        self.options = options
        self.occurrences: Occurrences | None = None
        if options.has_penalties:
            self.occurrences = Occurrences(self.token_ids, self.prompt_len)
        self.structured: Structured | None = None  # set by the engine
        self.is_ready = True  # False while its grammar or next mask is computed
        if max_new_tokens is None and options.max_tokens is not None:
            max_new_tokens = options.max_tokens - self.num_output_tokens
        self.max_new_tokens = UNLIMITED if max_new_tokens is None else max_new_tokens
        self.max_len = self.num_given_tokens + self.max_new_tokens

    def bind(self, info: ModelInfo) -> None:
        """Apply the model's EOS tokens and context length."""
        # A structure decides where EOS may be drawn.
        is_endless = self.options.ignore_eos and self.options.structure is None
        eos = frozenset[int]() if is_endless else info.eos_token_ids
        self.stop_ids = eos.union(self.options.stop_token_ids)
        self.max_len = min(self.max_len, info.max_model_len)

    def resume(
        self, token_ids: list[int], options: Options, max_new_tokens: int | None
    ) -> Problem | None:
        """Continue a reservation with its own tokens and at least one more.

        If `token_ids` are not that, return the problem and change nothing.
        """
        reserved = self.num_tokens
        if len(token_ids) <= reserved or token_ids[:reserved] != self.token_ids:
            message = "the tokens to continue are not those reserved and at least one more"
            return ErrorCode.INVALID_REQUEST, message
        self.token_ids = token_ids
        self.prompt_len = reserved - options.generated_tokens
        self.num_given_tokens = len(token_ids)
        self.num_computed_tokens = reserved
        self.ask(options, max_new_tokens)
        return None

    def move_to(self, status: Status) -> None:
        """Change the status.

        Raises:
            LocalProtocolError: `TRANSITIONS` does not allow it.
        """
        if status not in TRANSITIONS[self.status]:
            raise LocalProtocolError(
                f"request {self.request_id}: no way from {self.status} to {status}"
            )
        self.status = status

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens without KV: the rest of the prompt, or the last sampled token."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens of the request, other workers' included."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_new_tokens(self) -> int:
        """Generated tokens of this worker."""
        return len(self.token_ids) - self.num_given_tokens

    def max_drafts(self) -> int:
        """Return the most useful drafts: one more token is drawn after the last of them."""
        if self.structured is not None and self.structured.is_slow:
            return 0  # each draft would need a mask in the step
        num_drafts = self.max_len - len(self.token_ids) - 1
        if num_drafts > self.draft_window:
            return self.draft_window
        return num_drafts if num_drafts > 0 else 0

    def adapt(self, num_drafts: int, num_accepted: int) -> None:
        """Allow twice as many drafts if all were accepted, else one more than were."""
        if num_accepted == num_drafts:
            self.draft_window = min(2 * self.draft_window, MAX_DRAFTS)
        else:
            self.draft_window = num_accepted + 1

    @property
    def is_decoding(self) -> bool:
        """True if only the last sampled token lacks its KV; never of a transfer."""
        computed = self.num_computed_tokens
        is_read = computed >= self.prompt_len and not self.transfer
        return is_read and computed + 1 == len(self.token_ids)

    @property
    def max_cached_tokens(self) -> int:
        """The most leading tokens to take from the prefix cache.

        The last token is always computed, for its logits, and so are prompt tokens to be scored.
        """
        if self.scores is None:
            return len(self.token_ids) - 1
        return min(self.scores.num_scored, len(self.token_ids) - 1)

    def take_prompt_logprobs(self) -> bytes | None:
        """Return the requested prompt logprobs, once."""
        scores, self.scores = self.scores, None
        return None if scores is None else scores.packed()

    def keys(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Return the tokens of each of the first full blocks, as u32 little-endian."""
        known = len(self.block_keys)
        if known < num_blocks:
            pack = _packer(block_size)
            self.block_keys += [
                pack(*self.token_ids[start : start + block_size])
                for start in range(known * block_size, num_blocks * block_size, block_size)
            ]
        return self.block_keys[:num_blocks]

    def may_take(self, num_blocks: int, pool: BlockPool, later: Many[int] = ()) -> bool:
        """Return whether its windows may grow by `num_blocks`; see `Windows.may_promise`."""
        held = len(self.block_table)
        return pool.windows is None or pool.windows.may_promise(held, held + num_blocks, later)

    def take(self, num_blocks: int, pool: BlockPool, cached: Iterable[int] = ()) -> None:
        """Allocate `num_blocks` fresh blocks after the `cached` ones."""
        held = len(self.block_table)
        self.block_table.extend(pool.allocate(num_blocks, [*cached]))
        if pool.windows is not None:
            pool.windows.promise(held, len(self.block_table))

    def give_back(self, pool: BlockPool, num_kept: int = 0) -> None:
        """Free all blocks but the first `num_kept`."""
        held = len(self.block_table)
        if pool.windows is not None:
            self._reach(min(self.window_start, num_kept), min(self.window_end, num_kept), pool)
            pool.windows.promise(held, num_kept)
        pool.free(self.block_table[num_kept:])
        del self.block_table[num_kept:]

    @property
    def reached(self) -> Many[int]:
        return self.block_table[self.window_start : self.window_end]

    def look_ahead(self, num_tokens: int, pool: BlockPool) -> None:
        """Move the window to cover the next tokens and all they attend to."""
        start = self.num_computed_tokens
        self.look(start, start + num_tokens, pool)

    def look(self, next_token: int, num_tokens: int, pool: BlockPool) -> None:
        """Move the window to cover all that `next_token` attends to, up to `num_tokens`."""
        if pool.windows is not None:
            first = pool.windows.first_seen(next_token) // pool.block_size
            self._reach(first, pool.blocks_for(num_tokens), pool)

    def _reach(self, start: int, end: int, pool: BlockPool) -> None:
        """Reach the blocks [start, end) of the table only; windows move forward only."""
        assert pool.windows is not None
        if (start, end) == (self.window_start, self.window_end):
            return  # the usual case in decode steps
        before = range(self.window_start, min(start, self.window_end))
        behind = range(max(end, self.window_start), self.window_end)
        pool.leave(self.block_table[index] for it in (before, behind) for index in it)
        for index in range(max(start, self.window_end), end):
            pool.windows.reach(self.block_table[index])
        self.window_start, self.window_end = start, end

    def register(self, pool: BlockPool) -> None:
        """Put full blocks into the prefix cache, and hold the state after the last token."""
        before = self.state_block
        self._hold_state(self.num_computed_tokens, pool)  # before the state could be dropped
        self._register_full(pool)
        if pool.states is not None:
            pool.states.release(before)
            if self.state_block is not None:
                pool.states.slots.forget(self.state_block, but=self.num_computed_tokens)

    def _register_full(self, pool: BlockPool) -> None:
        states = pool.states
        num_full = self.num_computed_tokens // pool.block_size
        if num_full == self.num_registered_blocks:
            return
        keys = self.keys(num_full, pool.block_size)
        for index in range(self.num_registered_blocks, num_full):
            start, end = index * pool.block_size, (index + 1) * pool.block_size
            block = self.block_table[index]
            has_state = False
            if states is not None and (has_state := states.slots.has(block, end)):
                states.slots.forget(block, but=end)
                if start > self.prompt_len:  # one state of the generated tokens is enough
                    states.drop(self.block_table[index - 1])
            self.prefix = pool.register(
                *(self.prefix, keys[index], block),
                num_lacking=min(max(self.whole_from - start, 0), pool.block_size),
                has_state=has_state,
            )
        self.num_registered_blocks = num_full

    def go_on_from(self, position: int, pool: BlockPool) -> None:
        """Hold the state after `position` tokens instead of an earlier one."""
        before = self.state_block
        self._hold_state(position, pool)
        if pool.states is not None:
            pool.states.release(before)

    def _hold_state(self, position: int, pool: BlockPool) -> None:
        if pool.states is not None:
            last = (position - 1) // pool.block_size
            self.state_block = self.block_table[last] if position else None
            pool.states.hold(self.state_block)

    def undo(self, pool: BlockPool) -> None:
        """Drop what a failed step has left."""
        self.look_ahead(0, pool)
        if pool.states is not None:
            first = -(-self.num_computed_tokens // pool.block_size)
            for block in self.block_table[first:]:
                pool.states.slots.forget(block)
            if self.state_block is not None:
                pool.states.slots.forget(self.state_block, but=self.num_computed_tokens)

    def filled(self, num_tokens: int, pool: BlockPool) -> list[Place]:
        """Return the future cache place of the first block that `num_tokens` more fill, if any."""
        index = self.num_registered_blocks
        is_full = self.num_computed_tokens + num_tokens >= (index + 1) * pool.block_size
        if not is_full or not pool.enable_prefix_cache:
            return []
        return [(self.prefix.serial, self.keys(index + 1, pool.block_size)[index])]

    def missing(self, pool: BlockPool) -> list[Place]:
        """Return the place of the first full block that the prefix cache lacks, if any."""
        keys = self.keys(self.max_cached_tokens // pool.block_size, pool.block_size)
        cached, prefix = pool.match_prefix(keys)
        return [(prefix.serial, key) for key in keys[len(cached) : len(cached) + 1]]

    def problem(self, info: ModelInfo, pool: BlockPool, extra_tokens: int = 0) -> Problem | None:
        """Return why the model, or the empty pool, cannot serve it; None if they can."""
        if not self.token_ids:
            return ErrorCode.INVALID_REQUEST, "the prompt is empty"
        if self.prompt_len < 1:
            generated = self.options.generated_tokens
            message = f"generated_tokens is {generated}, not below the {self.num_tokens} ids"
            return ErrorCode.INVALID_REQUEST, message
        if min(self.token_ids) < 0 or max(self.token_ids) >= info.vocab_size:
            message = f"a token id is not in the model's vocabulary, 0 to {info.vocab_size - 1}"
            return ErrorCode.INVALID_REQUEST, message
        if self.max_new_tokens < 1:
            message = f"max_new_tokens is {self.max_new_tokens}, not at least 1"
            return ErrorCode.INVALID_REQUEST, message
        problem = prompt_logprobs_problem(self.prompt_len, self.options.prompt_logprobs)
        if problem is not None:
            return ErrorCode.INVALID_REQUEST, problem
        # The last token needs no KV: a prompt as long as the context may have one after it.
        if self.num_tokens + min(self.max_new_tokens - 1, 1) > info.max_model_len:
            message = f"{self.num_tokens} tokens fill the model's context of {info.max_model_len}"
            return ErrorCode.CONTEXT_LENGTH_EXCEEDED, message
        if not pool.can_ever_fit(self.num_tokens + extra_tokens):
            return self.out_of_blocks(pool)
        return None

    def out_of_blocks(self, pool: BlockPool) -> Problem:
        room = f"{pool.num_blocks} blocks of {pool.block_size} tokens"
        message = f"{self.num_tokens} tokens do not fit this worker's {room}"
        return ErrorCode.OUT_OF_BLOCKS, message

    def finish_reason(self) -> FinishReason | None:
        """Return why the last token ends the sequence; None if it does not."""
        token_ids = self.token_ids
        if token_ids[-1] in self.stop_ids:
            # A structure may end before min_tokens.
            is_over = self.structured is not None
            if is_over or self.num_output_tokens > self.options.min_tokens:
                return "stop"
        return "length" if len(token_ids) >= self.max_len else None

    def tokens_per_second(self, now: float) -> float:
        if self.started_s is None or now <= self.started_s:
            return 0.0
        return self.num_new_tokens / (now - self.started_s)


def overdue(options: Options) -> Problem:
    # The client's deadline, less the time that had passed when the request came here.
    message = f"not finished within the {options.deadline_ms} ms that its deadline_ms left"
    return ErrorCode.DEADLINE_EXCEEDED, message
