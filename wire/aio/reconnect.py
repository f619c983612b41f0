"""When a link tries again to reach a peer that is not there.

libzmq's own reconnecting is off: it has either a jitter or a growing pause, and it starts anew at
each connection that was accepted, be it by a proxy with nobody behind it.  Only a completed
handshake counts here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final, Protocol

FIRST_S: Final = 0.1
# A router that restarts is to serve within 2 s, most of which its start may take on a busy machine:
# for half a minute nobody waits long.  What is away for longer is not restarting, and a thousand
# workers had better not knock twice a second.
BRIEF_S: Final = 30.0
MAX_BRIEF_S: Final = 0.5
MAX_S: Final = 30.0
# A try ends by itself: `sockopts` bounds the connection and the handshake, 5 s each.  A name that
# is not found ends it without an event.
TRY_S: Final = 12.0


def pauses(draw: Callable[[], float]) -> Iterator[float]:
    """Yield the seconds before each try of one outage, without an end.

    They double from 0.1 s to 0.5 s, and on to 30 s when 30 s have been waited.  `draw` gives
    numbers from 0 to 1: each pause is shortened by up to a half, or all would come at once.
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


class Dial:
    """Retries until `succeed` is called, and starts again at the next `fail`.

    `connect` starts a try; the caller tells how it ended by `succeed` or `fail`.  The first try is
    taken to be under way already.  `call_later` is the loop's.
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
