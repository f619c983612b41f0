"""Retries of failed attempts: for which errors, how often, how soon.

The next attempt prefills the prompt and the tokens generated so far under a new request id, and
continues at the next token.  Retries are limited per request and by a budget of all requests (as in
Finagle: a burst, then a fraction of the traffic).  Pure.
"""

from __future__ import annotations

from typing import Final

from router.core.fleet import Worker
from router.core.state import Attempt, RequestState
from wire.errors import ErrorCode, WireError

# Errors of a worker, of a transfer, or of the moment: another attempt may go well (SPEC 8).
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
# The retries that the budget earns with each request and each second.
PER_REQUEST: Final = 0.2
PER_S: Final = 10.0
# Before another attempt, doubled each time; after a lost worker there is no pause.
PAUSE_S: Final = 0.1


class RetryBudget:
    """The retries that the router may still make: at most `burst`, earned by requests and time."""

    def __init__(self, burst: int, now: float) -> None:
        self._burst = float(burst)
        self._left = float(burst)
        self._earned_at = now

    def earn(self) -> None:
        """Count an accepted request."""
        self._left = min(self._burst, self._left + PER_REQUEST)

    def spend(self, now: float) -> bool:
        """Take one retry; False if there is none left."""
        self._left = min(self._burst, self._left + PER_S * (now - self._earned_at))
        self._earned_at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def pause_s(state: RequestState, error: WireError) -> float:
    """Return the pause before the next attempt of a request."""
    if error.code is ErrorCode.WORKER_LOST:
        return 0.0
    return float(PAUSE_S * 2 ** (state.num_attempts - 1))


def given_up(state: RequestState, error: WireError, reason: str) -> WireError:
    """Return the client's error: the last one, with the reason why no attempt follows."""
    if state.num_attempts <= 1 and not reason:
        return error
    tries = f"attempt {state.num_attempts} failed"
    return WireError(error.code, f"{error.message} ({', '.join(filter(None, [tries, reason]))})")


def at_fault(attempt: Attempt, error: WireError, blamed: Worker | None) -> set[bytes]:
    """Return the workers that the next attempt should avoid: after a failed transfer both ends."""
    is_between = error.code is ErrorCode.TRANSFER_FAILED
    workers = (attempt.prefill, attempt.decode) if is_between else (blamed,)
    return {worker.identity for worker in workers if worker is not None}
