"""Rate-limit log lines: repeats with the same labels are counted, progress is logged seldom."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

# The interval between two lines with the same labels.
AGAIN_S: Final = 10.0
# Limit for the number of label sets; lines with further labels are all logged.
MAX_CAUSES: Final = 256


# The interval between two lines of progress.
PROGRESS_S: Final = 2.0


class ProgressLine:
    """Logs how far work is that takes long, at most every `PROGRESS_S` seconds.

    The end is not logged, so that quick work logs nothing.  `labels` are in all lines.
    """

    def __init__(
        self,
        note: Callable[..., Any],
        event: str,
        clock: Callable[[], float] = time.monotonic,
        **labels: object,
    ) -> None:
        self._note, self._event, self._clock, self._labels = note, event, clock, labels
        self._due = clock() + PROGRESS_S

    def at(self, done: int, of: int) -> None:
        """Log that `done` of `of` parts are done, if a line is due."""
        if done < of and (now := self._clock()) >= self._due:
            self._due = now + PROGRESS_S
            self._note(self._event, **self._labels, done=done, of=of)


@dataclass(slots=True)
class _Repeats:
    due: float
    count: int = 0


class RepeatedLine:
    """Rate-limits the log lines of one event.

    The first line per set of labels (`cause`) is logged and repeats are counted.  `tick` logs their
    number; call it regularly.

        failed = RepeatedLine(log.warning, "request failed", time.monotonic)
        failed.add({"stage": "decode"}, request=7)  # logged
        failed.add({"stage": "decode"}, request=8)  # counted: "repeated=1" after `AGAIN_S`

    Args:
        note: Logs a line, such as a bound logger's `warning`.
    """

    def __init__(self, note: Callable[..., Any], event: str, clock: Callable[[], float]) -> None:
        self._note = note
        self._event = event
        self._clock = clock
        self._causes: dict[tuple[tuple[str, object], ...], _Repeats] = {}

    def add(self, cause: Mapping[str, object], **details: object) -> None:
        """Log the event with its details, or count it if the same `cause` was logged recently."""
        key = tuple(cause.items())
        repeats = self._causes.get(key)
        if repeats is not None:
            repeats.count += 1
            return
        if len(self._causes) < MAX_CAUSES:
            self._causes[key] = _Repeats(self._clock() + AGAIN_S)
        self._note(self._event, **cause, **details)

    def tick(self) -> None:
        """Log the number of repeats for each cause that is due; remove causes without repeats."""
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
