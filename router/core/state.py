"""One request inside the router, and its attempts: each a try of it on two workers.

A `RequestState` is the client's request from `submit` to its end.  An `Attempt` is one try of it
under an id from `RequestIds`, which is never used again.  All of them are in the tables of
`router.core.dispatcher`.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from hashlib import blake2b
from typing import Final, Protocol

import msgspec
from msgspec import Struct, structs

from router.core.fleet import Worker
from router.core.request import Request, RequestEnd, Sink
from wire.errors import ErrorCode, WireError
from wire.frames import MAX_TOKEN_ID, Frame, Role
from wire.options import Options
from wire.parts import Buffer
from wire.payloads import PrefillResult, Usage

# Rounds of the Feistel network that hides the order of the ids of attempts.
_NUM_ROUNDS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a router's requests; times are in seconds.

    Attributes:
        lease_s: A request whose client has not sent DECODE_REQUEST keeps its KV for this long.
        max_attempts: Of one request; 1 means that what failed is not tried again.
        retry_burst: Attempts after the first that all requests together may make at once
            (`router.core.failover`): as many as a few lost workers cost.
        vocab_size: Of the model; where the router cannot tell, the largest that fits a frame.
    """

    max_waiting: int = 1024
    max_running_per_worker: int = 256
    queue_timeout_s: float = 30.0
    lease_s: float = 30.0
    deadline_s: float = 600.0
    max_attempts: int = 4
    retry_burst: int = 1024
    vocab_size: int = MAX_TOKEN_ID + 1


class Observer(Protocol):
    """One of `Dispatcher.observers`: metrics, for one.  Must not raise."""

    def on_request_end(self, end: RequestEnd) -> None:
        """An accepted request ended, in whatever way; called once for each."""


class Send(Protocol):
    """Sends one message to a worker.  Never raises: that a worker is gone is reported elsewhere."""

    def __call__(self, peer: bytes, frames: Frame | Sequence[Frame], *payload: Buffer) -> None:
        """Send `frames` with their payload parts."""


class Phase(Enum):
    """How far a request is.  HELD: its prompt is read, and its client, one of raw TCP, has not sent
    DECODE_REQUEST yet."""

    WAITING = auto()
    PREFILL = auto()
    HELD = auto()
    DECODE = auto()


@dataclass(eq=False, slots=True)
class Attempt:
    """One try of a request.

    Attributes:
        prefill: The worker that reads the prompt; None once the decode worker holds the KV.
        decode: The worker that generates; None if the first token is also the last.
        num_generated: Tokens that earlier attempts had generated when this one began.
        is_reading: Whether PREFILL_DONE is still to come.
        num_due: Tokens that the decode worker may still send: none before it is asked.
        generated, sink: Those of its request, kept here too because every token needs them.
    """

    request_id: int
    state: RequestState
    prefill: Worker | None
    decode: Worker | None
    num_generated: int = 0
    is_reading: bool = True
    num_due: int = 0
    generated: list[int] = field(init=False)
    sink: Sink = field(init=False)

    def __post_init__(self) -> None:
        self.generated, self.sink = self.state.generated, self.state.sink

    @property
    def seq_len(self) -> int:
        """Tokens that are read: the prompt, and what earlier attempts had generated."""
        return len(self.state.request.token_ids) + self.num_generated

    def options(self, now: float) -> Options:
        """Return the options for its workers: the client's, with its tenant, the limit on tokens,
        those of earlier attempts included, and the time that is left."""
        state = self.state
        options = state.request.options
        changes: dict[str, int | None] = {"tenant": tenant_of(state.request.client)}
        if state.new_tokens is not None and options.max_tokens != state.new_tokens + 1:
            changes["max_tokens"] = state.new_tokens + 1
        if options.deadline_ms is not None:
            changes["deadline_ms"] = max(1, round((state.deadline - now) * 1000))
        if self.num_generated:
            changes |= {"generated_tokens": self.num_generated, "prompt_logprobs": None}
        return structs.replace(options, **changes)


class RequestState(Struct, eq=False):
    """One request between `submit` and its end.

    Attributes:
        new_tokens: Tokens wanted after the first; None while a raw TCP client has not said.
        is_decode_asked: Whether the client has said how many tokens it wants.
        due: When the request ends with an error if it is no further by then: see `overdue`.
        avoided: Identities of workers that failed it: others are chosen if there are any.
        arithmetic: Of the decode worker that got it first: workers of the same are chosen later,
            where they have room.  Empty before that.
        trouble: What its last attempt failed with.
        first: The answer to the prompt, with the first token.
    """

    handle: int
    request: Request
    sink: Sink
    new_tokens: int | None
    is_decode_asked: bool
    submitted_at: float
    deadline: float
    due: float
    phase: Phase = Phase.WAITING
    attempt: Attempt | None = None
    num_attempts: int = 0
    avoided: frozenset[bytes] = frozenset()
    arithmetic: str = ""
    trouble: WireError | None = None
    generated: list[int] = msgspec.field(default_factory=list)
    first: PrefillResult | None = None
    kv_bytes: int = 0
    placed_at: float | None = None
    first_at: float | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt and what was generated: what another attempt would read."""
        prompt = self.request.token_ids
        return (*prompt, *self.generated) if self.generated else prompt

    @property
    def seq_len(self) -> int:
        """How many tokens another attempt would read."""
        return len(self.request.token_ids) + len(self.generated)

    @property
    def is_parked(self) -> bool:
        """Whether its KV is kept on workers, and no DECODE_REQUEST has come yet."""
        return self.phase is Phase.HELD and self.attempt is not None

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the longest answer, as far as the client has said by now.

        If one token is all that is asked for it does not count: nobody reads it.
        """
        num_more = 0 if self.new_tokens == 0 else 1 + (self.new_tokens or 0)
        return len(self.request.token_ids) + num_more

    @property
    def num_left(self) -> int | None:
        """Tokens still to be generated; None while a raw TCP client has not said how many."""
        return None if self.new_tokens is None else self.new_tokens + 1 - len(self.generated)

    def overdue(self, now: float) -> WireError:
        """Return the error of a request whose `due` has passed."""
        if now >= self.deadline:
            passed = self.deadline - self.submitted_at
            return WireError(
                ErrorCode.DEADLINE_EXCEEDED, f"the request did not end within {passed:g} s"
            )
        if self.phase is Phase.WAITING:
            return self.trouble or WireError(
                ErrorCode.OVERLOADED, f"no worker had room for {now - self.submitted_at:.0f} s"
            )
        return WireError(
            ErrorCode.DEADLINE_EXCEEDED, "no DECODE_REQUEST came while the KV cache was held"
        )

    def end(self, now: float, code: ErrorCode | None, usage: Usage | None) -> RequestEnd:
        """Return how this request ended and what it took."""
        first_at, placed_at = self.first_at, self.placed_at
        usage = usage or Usage(finish_reason="", kv_bytes=self.kv_bytes)
        return RequestEnd(
            outcome=usage.finish_reason if code is None else code.label,
            code=code,
            client=self.request.client,
            prompt_tokens=len(self.request.token_ids),
            cached_tokens=0 if self.first is None else self.first.cached_tokens,
            completion_tokens=len(self.generated),
            kv_bytes=usage.kv_bytes,
            kv_skipped_tokens=usage.kv_skipped_tokens,
            kv_seconds=usage.kv_seconds,
            kv_transfer_seconds=usage.kv_transfer_seconds,
            queue_s=None if placed_at is None else placed_at - self.submitted_at,
            ttft_s=None if first_at is None else first_at - self.submitted_at,
            decode_s=None if first_at is None else now - first_at,
            total_s=now - self.submitted_at,
            num_attempts=self.num_attempts,
        )


def new_tokens(request: Request) -> int | None:
    """Return how many tokens after the first a request asks for; None if it does not say."""
    limits = [] if request.max_new_tokens is None else [request.max_new_tokens]
    if request.options.max_tokens is not None:
        limits.append(request.options.max_tokens - 1)
    return min(limits, default=None)


@lru_cache(maxsize=1024)
def tenant_of(client: str) -> int:
    """Return the number by which workers tell clients apart; every router finds the same one."""
    if not client:
        return 0
    digest = blake2b(client.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # SPEC 4.8: 63 bits


def no_worker(role: Role) -> WireError:
    """Return the error of a request for which a worker of this role is missing."""
    name = role.name.lower()
    return WireError(ErrorCode.NO_WORKER, f"no {name} worker is ready; try again shortly")


class RequestIds:
    """The ids of attempts: none comes twice, and who knows some of them cannot guess another.

    A worker learns the ids of what is placed on it.  If they were consecutive, it could offer KV
    under the id of somebody else's request before that request's own prefill worker does (SPEC
    6.2).  So the lower half of an id is a counter whose 32 bits are permuted with a secret key: a
    Feistel network with BLAKE2b.  The upper half is `epoch` (32 bits too).
    """

    def __init__(self, epoch: int, key: bytes | None = None) -> None:
        self.epoch = epoch
        self._key = secrets.token_bytes(16) if key is None else key
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        rounds, number = divmod(next(self._numbers), 1 << 32)
        return (self.epoch + rounds << 32) + self._permute(number)

    def _permute(self, number: int) -> int:
        left, right = divmod(number, 1 << 16)
        for i in range(_NUM_ROUNDS):
            block = bytes((i, right >> 8, right & 0xFF))
            mask = blake2b(block, digest_size=2, key=self._key).digest()
            left, right = right, left ^ int.from_bytes(mask, "little")
        return left << 16 | right
