"""Rate-limits a log line: the first of a cause is written, then the number that followed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

# Between two lines of one cause: soon enough for a person, few enough for a log.
AGAIN_S: Final = 10.0
# Causes that are remembered; a line of any other is logged each time.
MAX_CAUSES: Final = 256


@dataclass(slots=True)
class _Repeats:
    due: float
    count: int = 0


class RepeatedLine:
    """Logs one event, by its causes.  Call `tick` now and then.

        failed = RepeatedLine(log.warning, "request failed", time.monotonic)
        failed.add({"stage": "decode"}, request=7)  # logged
        failed.add({"stage": "decode"}, request=8)  # counted: "repeated=1" after `AGAIN_S`

    Args:
        note: Logs a line, as a bound logger's `warning` does.
    """

    def __init__(self, note: Callable[..., Any], event: str, clock: Callable[[], float]) -> None:
        self._note = note
        self._event = event
        self._clock = clock
        self._causes: dict[tuple[tuple[str, object], ...], _Repeats] = {}

    def add(self, cause: dict[str, object], **details: object) -> None:
        """Log it, with details that differ each time; count it if its cause was logged lately."""
        key = tuple(cause.items())
        repeats = self._causes.get(key)
        if repeats is not None:
            repeats.count += 1
            return
        if len(self._causes) < MAX_CAUSES:
            self._causes[key] = _Repeats(self._clock() + AGAIN_S)
        self._note(self._event, **cause, **details)

    def tick(self) -> None:
        """Log the repetitions of each cause when due, and forget causes without any."""
        if not self._causes:
            return
        now = self._clock()
        for key, repeats in list(self._causes.items()):
            if now < repeats.due:
                continue
            if repeats.count:
                self._note(self._event, **dict(key), repeated=repeats.count)
                self._causes[key] = _Repeats(now + AGAIN_S)
            else:
                del self._causes[key]
