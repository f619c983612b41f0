"""When a link tries again to reach a peer that is down.

libzmq's own reconnecting is off: it has jitter or growing pauses but not both, and starts anew at
each accepted connection, even of a proxy without a backend.  Only a completed handshake counts
here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final, Protocol

FIRST_S: Final = 0.1
# A restarted router should serve within 2 s, so pauses are short for half a minute.  After that it
# is not just restarting, and a thousand workers should not try twice a second.
BRIEF_S: Final = 30.0
MAX_BRIEF_S: Final = 0.5
MAX_S: Final = 30.0
# A try ends by itself: `sockopts` bounds connection and handshake to 5 s each.  A name that does
# not resolve ends it without an event.
TRY_S: Final = 12.0


def pauses(draw: Callable[[], float]) -> Iterator[float]:
    """Yield the seconds before each try of one outage, without an end.

    They double from 0.1 s to 0.5 s, and on to 30 s after 30 s of waiting.  `draw` gives numbers
    from 0 to 1: each pause is shortened by up to a half, so that workers do not come back all at
    once.
    """
    whole_s, waited_s = FIRST_S, 0.0
    while True:
        pause_s = whole_s * (1 - 0.5 * draw())
        waited_s += pause_s
        yield pause_s
        whole_s = min(2 * whole_s, MAX_BRIEF_S if waited_s < BRIEF_S else MAX_S)


class Timer(Protocol):
    """The handle that `loop.call_later` returns."""

    def cancel(self) -> None: ...


class Reconnect:
    """Retries until `succeed` is called, and starts again at the next `fail`.

    `connect` starts a try; the caller reports its end.  The first try is already under way.
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
        """The peer is connected: the next outage starts with short pauses again."""
        self._timer.cancel()
        self._pauses = pauses(self._draw)

    def fail(self) -> None:
        """The try failed, or the connection ended: try again after a pause."""
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
