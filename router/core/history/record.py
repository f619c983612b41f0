"""The record that the router keeps of a request; see `router.core.history.requests`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from msgspec import Struct

from router.core.fleet import Worker


class Outline(Protocol):
    """Finds the part of a prompt that a token is in; see `router.text.outline`."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, in bytes."""

    def part_after(self, token_ids: Sequence[int]) -> str:
        """Return the part of the token that follows the first tokens `token_ids`."""


class Progress(Protocol):
    """How far an open request is: a `router.core.state.RequestState`, which imports this module."""

    @property
    def placed_at(self) -> float | None: ...
    @property
    def first_at(self) -> float | None: ...
    @property
    def generated(self) -> Sequence[int]: ...


class Reason(StrEnum):
    """Why as many tokens of a prompt were cached as there were, and no more."""

    HIT = "hit"
    SHORT = "shorter_than_a_block"
    UNSEEN = "first_seen"
    EXTENDED = "extended"
    DIVERGED = "diverged"
    NOT_REMEMBERED = "not_remembered"
    PROMPT_LOGPROBS = "prompt_logprobs"
    OTHER_SALT = "other_salt"
    IN_FLIGHT = "in_flight"
    CACHE_OFF = "cache_off"
    EVICTED = "evicted"
    ELSEWHERE = "elsewhere"
    WORKER_LOST = "worker_lost"
    WORKER_RESTARTED = "worker_restarted"
    NOT_KEPT = "not_kept"


class Placed(Struct, frozen=True, gc=False):
    """The workers of one attempt, by identity.

    `local` is why one worker did it alone: ``no_prefill_worker`` had capacity, or ``cost``: it took
    less time; None if a prefill worker did the prefill.  `at` is on the core's clock.
    """

    prefill: bytes | None
    decode: bytes | None
    local: str | None
    at: float


class Match(Struct, frozen=True):
    """The earlier request of the same client that a prompt shares most leading tokens with.

    `num_tokens` were in its chain, and `is_in_flight` was true, when the prompt was placed.
    """

    earlier: Record
    tokens: int
    num_tokens: int
    is_in_flight: bool

    @property
    def is_whole(self) -> bool:
        """Whether the prompt goes on where the tokens of the earlier request end."""
        return self.tokens == self.num_tokens

    @property
    def usable(self) -> int:
        """The shared tokens that a worker may have cached: it never reads the last of an answer."""
        has_answer = self.num_tokens > self.earlier.num_tokens
        return min(self.tokens, self.num_tokens - has_answer)

    @property
    def ended_at(self) -> float | None:
        """When the earlier request ended, on the core's clock; None if it is open."""
        end = self.earlier.end
        return None if end is None else self.earlier.submitted_at + end.total_s


class Loss(NamedTuple):
    """How a worker ceased to have a block: by eviction, or because the worker itself was lost."""

    worker: str
    at: float
    is_evicted: bool


class Holder(NamedTuple):
    """The worker that had most of a prompt, in tokens, and why it did not do the prefill."""

    worker: str
    tokens: int
    because: str


class Seen(Struct, frozen=True):
    """The state of the caches, as far as known, when a request was placed; counts are in tokens.

    Attributes:
        prefiller: The worker that does the prefill.
        expected: The tokens that this worker was believed to have cached.
        reusable: The tokens in whole blocks that an earlier request of the client has in common.
        loss: How the first block after the expected ones was lost, if the router knows.
        holder: Another worker that had more than the expected tokens.
    """

    prefiller: Worker
    hashes: Sequence[int]
    expected: int
    reusable: int
    match: Match | None
    loss: Loss | None
    holder: Holder | None


class Cache(Struct, frozen=True, gc=False):
    """How much of a prompt was cached where, in tokens, and why it was not more.

    Attributes:
        longest_match: Leading tokens that the prompt shares with an earlier one of the client.
        reusable: Those of them that are in whole blocks, which a cache could have had.
        diverged_at: The index of the first token that differs from the earlier prompt.
        earlier: The id of the earlier request.
        worker: The worker that lost or has the tokens; `because` is why it did not do the prefill.
        at: When it lost them, on the core's clock.
    """

    reason: Reason
    prefill_worker: int
    decode_worker: int
    longest_match: int
    reusable: int
    diverged_at: int | None = None
    earlier: str | None = None
    worker: str | None = None
    because: str | None = None
    at: float | None = None


class Ended(Struct, frozen=True, gc=False):
    """How a request ended; the fields are those of `router.core.request.RequestEnd`."""

    outcome: str
    cached_tokens: int
    completion_tokens: int
    kv_bytes: int
    kv_skipped_tokens: int
    queue_s: float | None
    ttft_s: float | None
    total_s: float


class Record(Struct, eq=False, gc=False):
    """One request of the core.  `progress` and `seen` are dropped when it ends.

    `number` orders records by age.  `is_scored` means that it asks for `prompt_logprobs`.  `chain`
    has the tokens of the prompt and of the answer as little-endian u32, as long as they are kept.
    Records are no work for the garbage collector: the end of a request breaks their only cycle.
    """

    number: int
    name: str
    client: str
    salt: str
    num_tokens: int
    submitted_at: float
    progress: Progress | None
    outline: Outline | None = None
    is_scored: bool = False
    placed: tuple[Placed, ...] = ()
    prefiller: bytes = b""
    chain: bytes | None = None
    seen: Seen | None = None
    cache: Cache | None = None
    end: Ended | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether its prompt has not been read yet."""
        return self.progress is not None and self.progress.first_at is None

    @property
    def size(self) -> int:
        """The memory that its tokens take, in bytes."""
        outline_bytes = 0 if self.outline is None else self.outline.num_bytes
        return len(self.chain or b"") + outline_bytes
