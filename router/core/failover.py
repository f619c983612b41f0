"""The retry policy for failed attempts: which errors, how many retries, and the backoff.

The next attempt prefills the prompt and the tokens generated so far under a new request id, and
continues at the next token.  Retries are limited for each request, and by a budget shared by all
requests (as in Finagle: a burst, then a fraction of the traffic).  This module does no I/O.
"""

from __future__ import annotations

from typing import Final

from router.core.fleet import Worker
from router.core.placement import Placement
from router.core.state import Attempt, RequestState
from wire.errors import ErrorCode, WireError

# Errors of a worker or a transfer, and temporary ones: another attempt may succeed (SPEC 8).
AGAIN: Final = frozenset(
    {
        ErrorCode.INTERNAL,
        ErrorCode.OVERLOADED,
        ErrorCode.NO_WORKER,
        ErrorCode.DRAINING,
        ErrorCode.WORKER_LOST,
        ErrorCode.TRANSFER_FAILED,
        ErrorCode.OUT_OF_BLOCKS,
        ErrorCode.UNKNOWN_REQUEST,
    }
)
# The number of retries added to the budget for each accepted request and each second.
PER_REQUEST: Final = 0.2
PER_S: Final = 10.0
# The backoff before the first retry, doubled each time; after a lost worker there is none.
PAUSE_S: Final = 0.1


class RetryBudget:
    """A token bucket for retries: at most `burst`, refilled by accepted requests and over time."""

    def __init__(self, burst: int, now: float) -> None:
        self._burst = float(burst)
        self._left = float(burst)
        self._earned_at = now

    def earn(self) -> None:
        """Add `PER_REQUEST` retries for an accepted request."""
        self._left = min(self._burst, self._left + PER_REQUEST)

    def spend(self, now: float) -> bool:
        """Use up one retry; return False if none is left."""
        self._left = min(self._burst, self._left + PER_S * (now - self._earned_at))
        self._earned_at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def no_retry(
    state: RequestState,
    error: WireError,
    max_attempts: int,
    placement: Placement,
    budget: RetryBudget,
    now: float,
) -> str | None:
    """Return why a failed request is not retried, or None if it is retried.

    The reason is "" if `error` needs no addition.  The checks of `submit` are repeated, because the
    tokens generated so far lengthen the prompt of the next attempt.
    """
    if error.code not in AGAIN:
        return ""
    if state.num_attempts >= max_attempts:
        return "" if max_attempts == 1 else "no more are made"
    try:
        placement.check(state)
        placement.check_workers(state, now)
    except WireError as problem:
        if problem.code is not ErrorCode.NO_WORKER:
            return problem.message
    return None if budget.spend(now) else "too many are made at the moment"


def pause_s(state: RequestState, error: WireError) -> float:
    """Return the backoff before the next attempt of a request, in seconds."""
    if error.code is ErrorCode.WORKER_LOST:
        return 0.0
    return float(PAUSE_S * 2 ** (state.num_attempts - 1))


def given_up(state: RequestState, error: WireError, reason: str) -> WireError:
    """Return the error for the client: `error`, and the reason why it is not retried."""
    if state.num_attempts <= 1 and not reason:
        return error
    tries = f"attempt {state.num_attempts} failed"
    return WireError(error.code, f"{error.message} ({', '.join(filter(None, [tries, reason]))})")


def at_fault(attempt: Attempt, error: WireError, blamed: Worker | None) -> set[bytes]:
    """Return the workers that the next attempt should avoid: both ends of a failed transfer, else
    the worker `blamed`."""
    is_transfer = error.code is ErrorCode.TRANSFER_FAILED
    workers = (attempt.prefill, attempt.decode) if is_transfer else (blamed,)
    return {worker.identity for worker in workers if worker is not None}
