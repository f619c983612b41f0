"""Whether an engine's thread still gets anything done: what systemd and the routers are told.

`Pulse` feeds systemd's watchdog.  The thread takes calls between steps, and at once when it is
idle.  So a call that does nothing is answered exactly as long as steps end, and an idle engine
proves itself like a busy one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Thread(Protocol):
    """What of `worker.engine.thread.EngineThread` is used here."""

    def post(self, call: Callable[[Any], object]) -> None: ...


class Pulse:
    """Asks the engine's thread for a sign of life, one at a time."""

    def __init__(self, thread: Thread) -> None:
        self._thread = thread
        self._is_answered = True

    def is_felt(self) -> bool:
        """Return whether the last question was answered before this call; then ask the next."""
        if not self._is_answered:
            return False
        self._is_answered = False
        self._thread.post(self._answer)
        return True

    def _answer(self, _: object) -> None:
        self._is_answered = True


class Standstill:
    """For how many `seconds` the engine has been in one step.

    Counted in ticks: a pause of the whole process is not the engine's.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._steps = 0

    def tick(self, elapsed_s: float, steps: int, *, is_busy: bool) -> None:
        """Look again, `elapsed_s` after the last time; `steps` is how many have ended."""
        is_same = is_busy and steps == self._steps
        self.seconds = self.seconds + elapsed_s if is_same else 0.0
        self._steps = steps
