"""Whether a failed attempt is followed by another: for which errors, how often, how soon.

The next attempt reads the prompt and the tokens that the client has already, under a new request
id, and goes on at the next token.  Attempts cannot pile up on a cluster in trouble: each request
has a few, and all requests share a budget (as in Finagle: a burst, then a fraction of the traffic).
Pure.
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
# What the budget of retries earns with each request and each second: what was earned while all went
# well pays for a lost worker.
PER_REQUEST: Final = 0.2
PER_S: Final = 10.0
# Before another attempt, and twice as long each time; after a lost worker there is none.
PAUSE_S: Final = 0.1


class RetryBudget:
    """How many retries the router may still make: `burst` at most, earned by requests and time."""

    def __init__(self, burst: int, now: float) -> None:
        self._burst = float(burst)
        self._left = float(burst)
        self._earned_at = now

    def earn(self) -> None:
        """A new request was accepted."""
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
    """Return how long the request rests before its next attempt."""
    if error.code is ErrorCode.WORKER_LOST:
        return 0.0
    return float(PAUSE_S * 2 ** (state.num_attempts - 1))


def given_up(state: RequestState, error: WireError, reason: str) -> WireError:
    """Return the error the client gets: the last one, and why there is no further attempt."""
    if state.num_attempts <= 1 and not reason:
        return error
    tries = f"attempt {state.num_attempts} failed"
    return WireError(error.code, f"{error.message} ({', '.join(filter(None, [tries, reason]))})")


def at_fault(attempt: Attempt, error: WireError, blamed: Worker | None) -> set[bytes]:
    """Return which workers the next attempt should avoid: of a failed transfer, both ends."""
    is_between = error.code is ErrorCode.TRANSFER_FAILED
    workers = (attempt.prefill, attempt.decode) if is_between else (blamed,)
    return {worker.identity for worker in workers if worker is not None}
