"""One request inside the router: the client's side of it, and one try of it on two workers.

A `Flight` is the client's request from `submit` to its end; an `Attempt` is one try of it under a
request id that is never used again.  The table of them is `router.inflight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from msgspec import structs

from router.fleet import Worker
from router.request import Request, Sink
from wire.errors import ErrorCode, WireError
from wire.frames import Frame, Role
from wire.options import Options
from wire.parts import Buffer
from wire.payloads import PrefillResult, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the requests of a router; times in seconds."""

    max_waiting: int = 1024
    max_running_per_worker: int = 256
    queue_timeout_s: float = 30.0
    hold_s: float = 30.0
    deadline_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """What one accepted request came to; times in seconds, None when it did not get that far.

    `outcome` is the finish reason (``stop``, ``length``) or the label of `code`.  `queue_s` runs to
    the placement, `ttft_s` from submission to the first token, `decode_s` from there to the end.
    """

    outcome: str
    code: ErrorCode | None
    client: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    kv_bytes: int
    kv_skipped_tokens: int
    kv_seconds: float
    kv_transfer_seconds: float
    queue_s: float | None
    ttft_s: float | None
    decode_s: float | None
    total_s: float


class Observer(Protocol):
    """Who keeps the statistics: one of `InFlight.observers`.  Must not raise."""

    def on_request_end(self, end: RequestEnd) -> None:
        """An accepted request ended, in whatever way; called once for each."""


class Send(Protocol):
    """Sends one message to a worker; never raises: a peer that is gone is reported as lost."""

    def __call__(self, peer: bytes, frames: Frame | Sequence[Frame], *payload: Buffer) -> None:
        """Send `frames` with their payload parts."""


class Phase(Enum):
    """How far a flight is.  HELD: a raw TCP client has not sent its DECODE_REQUEST yet."""

    WAITING = auto()
    PREFILL = auto()
    HELD = auto()
    DECODE = auto()


@dataclass(eq=False, slots=True)
class Attempt:
    """One try of a flight.

    `prefill` becomes None once the decode worker has shown that it holds the KV, `decode` is None
    when the first token is the last.  `is_reading` until PREFILL_DONE.
    """

    request_id: int
    flight: Flight
    prefill: Worker | None
    decode: Worker | None
    is_reading: bool = True


@dataclass(eq=False, slots=True)
class Flight:
    """One request between `submit` and its end.

    `new_tokens` counts those after the first, None while a raw TCP client has set no limit at all.
    `due` is the next moment at which something must have happened: see `overdue`.
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
    generated: list[int] = field(default_factory=list)
    first: PrefillResult | None = None
    kv_bytes: int = 0
    placed_at: float | None = None
    first_at: float | None = None

    @property
    def options(self) -> Options:
        """What the workers are told: `max_tokens` says it when the number of tokens is known."""
        options = self.request.options
        if self.new_tokens is None or options.max_tokens == self.new_tokens + 1:
            return options
        return structs.replace(options, max_tokens=self.new_tokens + 1)

    def overdue(self, now: float) -> WireError:
        """Return the error of a flight whose `due` has passed."""
        if now >= self.deadline:
            passed = self.deadline - self.submitted_at
            return WireError(
                ErrorCode.DEADLINE_EXCEEDED, f"the request did not end within {passed:g} s"
            )
        if self.phase is Phase.WAITING:
            return WireError(
                ErrorCode.OVERLOADED, f"no worker had room for {now - self.submitted_at:.0f} s"
            )
        return WireError(
            ErrorCode.DEADLINE_EXCEEDED, "no DECODE_REQUEST came while the KV cache was held"
        )

    def end(self, now: float, code: ErrorCode | None, usage: Usage | None) -> RequestEnd:
        """Return what this flight came to."""
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
