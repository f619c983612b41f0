"""Scenes with real limits of time, played again where it was the loop that stood still.

Who stands still for longer than a limit is cut off, and rightly: that shows nothing of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
TURN_S = 0.02


class HeldUp:
    """For how many seconds in all the loop came to nothing, while `measured`."""

    def __init__(self) -> None:
        self._seconds = self._due = 0.0

    @property
    def seconds(self) -> float:
        return self._seconds + max(0.0, time.monotonic() - self._due)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        self._due = time.monotonic() + TURN_S
        task = asyncio.create_task(self._measure())
        try:
            yield
        finally:
            task.cancel()

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            now = time.monotonic()
            self._seconds += max(0.0, now - self._due)
            self._due = now + TURN_S


def again_if_held_up(
    limit_s: float,
) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]:
    """Play a test or a scene again that failed while the loop was held up for `limit_s` in all."""

    def decorate(play: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        @wraps(play)
        async def played(*args: P.args, **kwargs: P.kwargs) -> R:
            while True:
                held_up = HeldUp()
                try:
                    with held_up.measured():
                        return await play(*args, **kwargs)
                except Exception:
                    if held_up.seconds < limit_s:
                        raise
                    traceback.print_exc()  # shown if the test never succeeds

        return played

    return decorate
