"""Reconnect a link with exponential backoff and jitter.

libzmq's own reconnection is disabled: it has either jitter or backoff, and resets the backoff at
each accepted TCP connection, even if a proxy without a backend accepts it.  Here only a completed
handshake resets the backoff.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final, Protocol

FIRST_S: Final = 0.1
# A restarted router should have its workers back within 2 s, so pauses are short for half a minute.
# After that it is not just restarting, and a thousand workers should not retry twice a second.
BRIEF_S: Final = 30.0
MAX_BRIEF_S: Final = 0.5
MAX_S: Final = 30.0
# Timeout of an attempt.  `sockopts` limits connection and handshake to 5 s each, but if a host name
# cannot be resolved there is no event at all.
TRY_S: Final = 12.0


def pauses(draw: Callable[[], float]) -> Iterator[float]:
    """Yield the pauses in seconds before each attempt during one outage, endlessly.

    They double from 0.1 s up to 0.5 s, and after 30 s of waiting up to 30 s.  Jitter shortens each
    pause by up to a half, so that workers do not reconnect all at once; `draw` returns a random
    number from 0 to 1.
    """
    longest_s, waited_s = FIRST_S, 0.0
    while True:
        pause_s = longest_s * (1 - 0.5 * draw())
        waited_s += pause_s
        yield pause_s
        longest_s = min(2 * longest_s, MAX_BRIEF_S if waited_s < BRIEF_S else MAX_S)


class Timer(Protocol):
    """The handle that `loop.call_later` returns."""

    def cancel(self) -> None: ...


class Reconnect:
    """Retries a connection until `succeed` is called, and again after the next `fail`.

    `connect` starts an attempt, and the caller reports its outcome.  The caller must have started
    the first attempt.
    """

    def __init__(
        self,
        connect: Callable[[], None],
        call_later: Callable[[float, Callable[[], None]], Timer],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._connect = connect
        self._call_later = call_later
        self._draw = draw
        self._is_stopped = False
        self._pauses = pauses(draw)
        self._timer = call_later(TRY_S, self._try)

    def succeed(self) -> None:
        """Report a completed handshake; this resets the backoff."""
        self._timer.cancel()
        self._pauses = pauses(self._draw)

    def fail(self) -> None:
        """Report a failed attempt or lost connection; the next attempt follows after a pause."""
        self._wait(next(self._pauses))

    def stop(self) -> None:
        """Stop retrying for good."""
        self._is_stopped = True
        self._timer.cancel()

    def _try(self) -> None:
        self._wait(TRY_S)
        self._connect()

    def _wait(self, seconds: float) -> None:
        self._timer.cancel()
        if not self._is_stopped:
            self._timer = self._call_later(seconds, self._try)
