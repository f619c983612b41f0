"""One request inside the router: the client's side of it, and one try of it on two workers.

A `RequestState` is the client's request from `submit` to its end; an `Attempt` is one try of it
under a request id that is never used again.  The table of them is `router.core.dispatcher`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from msgspec import structs

from router.core.request import Request, RequestEnd, Sink
from router.core.worker import Worker
from wire.errors import ErrorCode, WireError
from wire.frames import MAX_TOKEN_ID, Frame, Role
from wire.options import Options
from wire.parts import Buffer
from wire.payloads import PrefillResult, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the requests of a router; times in seconds.

    `max_attempts` is per request, 1 is no failover; `retry_burst` is what all of them may spend at
    once (`router.core.failover`): a few lost workers' worth.  `vocab_size` is the model's, as far
    as the router can tell.
    """

    max_waiting: int = 1024
    max_running_per_worker: int = 256
    queue_timeout_s: float = 30.0
    hold_s: float = 30.0
    deadline_s: float = 600.0
    max_attempts: int = 4
    retry_burst: int = 1024
    vocab_size: int = MAX_TOKEN_ID + 1


class Observer(Protocol):
    """Who keeps the statistics: one of `Dispatcher.observers`.  Must not raise."""

    def on_request_end(self, end: RequestEnd) -> None:
        """An accepted request ended, in whatever way; called once for each."""


class Send(Protocol):
    """Sends one message to a worker; never raises: a peer that is gone is reported as lost."""

    def __call__(self, peer: bytes, frames: Frame | Sequence[Frame], *payload: Buffer) -> None:
        """Send `frames` with their payload parts."""


class Phase(Enum):
    """How far a request is.  HELD: a raw TCP client has not sent its DECODE_REQUEST yet."""

    WAITING = auto()
    PREFILL = auto()
    HELD = auto()
    DECODE = auto()


@dataclass(eq=False, slots=True)
class Attempt:
    """One try of a request, which had `num_generated` tokens when it began.

    `prefill` becomes None once the decode worker has shown that it holds the KV, `decode` is None
    when the first token is the last.  `is_reading` until PREFILL_DONE.
    """

    request_id: int
    state: RequestState
    prefill: Worker | None
    decode: Worker | None
    num_generated: int = 0
    is_reading: bool = True

    @property
    def seq_len(self) -> int:
        """Tokens that are read: the prompt, and what was generated before."""
        return len(self.state.request.token_ids) + self.num_generated

    def options(self, now: float) -> Options:
        """What its workers are told: the whole limit, the time left, what is no prompt."""
        state = self.state
        options = state.request.options
        changes: dict[str, int | None] = {}
        if state.new_tokens is not None and options.max_tokens != state.new_tokens + 1:
            changes["max_tokens"] = state.new_tokens + 1
        if options.deadline_ms is not None:
            changes["deadline_ms"] = max(1, round((state.deadline - now) * 1000))
        if self.num_generated:
            changes |= {"generated_tokens": self.num_generated, "prompt_logprobs": None}
        return structs.replace(options, **changes) if changes else options


@dataclass(eq=False, slots=True)
class RequestState:
    """One request between `submit` and its end.

    `new_tokens` counts those after the first, None while a raw TCP client has set no limit at all.
    `due` is the next moment at which something must have happened: see `overdue`.  `trouble` is
    what the last attempt failed of.
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
    # Workers that failed it, by identity: others are better, if there are any.
    avoided: set[bytes] = field(default_factory=set)
    trouble: WireError | None = None
    generated: list[int] = field(default_factory=list)
    first: PrefillResult | None = None
    kv_bytes: int = 0
    placed_at: float | None = None
    first_at: float | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt and what is generated: what the next attempt reads."""
        return (*self.request.token_ids, *self.generated)

    @property
    def is_parked(self) -> bool:
        """Whether it holds KV on a decode worker and no DECODE_REQUEST has come yet."""
        return self.phase is Phase.HELD and self.attempt is not None

    @property
    def total_tokens(self) -> int:
        """The longest it may become, prompt and answer; as far as the client has said by now."""
        return len(self.request.token_ids) + 1 + (self.new_tokens or 0)

    @property
    def num_left(self) -> int | None:
        """Tokens still to be generated; None while a raw TCP client has set no limit at all."""
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
        """Return what this request came to."""
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
    """Return how many tokens after the first a request asks for, None when it does not say."""
    limits = [] if request.max_new_tokens is None else [request.max_new_tokens]
    if request.options.max_tokens is not None:
        limits.append(request.options.max_tokens - 1)
    return min(limits, default=None)


def no_worker(role: Role) -> WireError:
    """Return the error of a request that no worker of this role is there for."""
    name = role.name.lower()
    return WireError(ErrorCode.NO_WORKER, f"no {name} worker is ready; try again shortly")
