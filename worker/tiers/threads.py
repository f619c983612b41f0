"""A thread for the jobs of a tier, so that neither copies nor a slow disk delay a step.

The engine's thread puts jobs and later collects their results.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")
Job = tuple[Callable[[], Any], Callable[[Any], object]]


class Results:
    """Results of jobs, from several threads; `wake` is called for each one, on its thread."""

    def __init__(self) -> None:
        self.wake: Callable[[], object] = lambda: None
        self._results: deque[Callable[[], object]] = deque()
        self._is_new = threading.Event()

    def __len__(self) -> int:
        return len(self._results)

    def add(self, deliver: Callable[[], object]) -> None:
        self._results.append(deliver)
        self._is_new.set()
        self.wake()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a result; return whether there is one."""
        return self._is_new.wait(timeout_s)

    def deliver(self) -> None:
        """Call what the ended jobs asked for, on the caller's thread."""
        self._is_new.clear()
        while self._results:
            self._results.popleft()()


class JobThread:
    """Runs jobs one after another: first those that a request waits for."""

    def __init__(self, name: str, results: Results) -> None:
        self._results = results
        self._wake = threading.Condition()
        self._awaited: deque[Job] = deque()
        self._other: deque[Job] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def put(
        self, work: Callable[[], R], done: Callable[[R], object], *, is_awaited: bool = False
    ) -> None:
        """Run `work()` on this thread, then `done` with its result where results are delivered."""
        with self._wake:
            (self._awaited if is_awaited else self._other).append((work, done))
            self._wake.notify()

    def close(self, wait_s: float) -> bool:
        """End the thread after its jobs; return whether it has ended within `wait_s` seconds."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while (job := self._next_job()) is not None:
            work, done = job
            self._results.add(_outcome(work, done))
            del job, work, done  # releases buffers before the next wait

    def _next_job(self) -> Job | None:
        with self._wake:
            while not (self._awaited or self._other):
                if self._is_closing:
                    return None
                self._wake.wait()
            return (self._awaited or self._other).popleft()


def _outcome(work: Callable[[], R], done: Callable[[R], object]) -> Callable[[], object]:
    """Run a job; return a function that calls `done` with its result, or raises what it raised.

    `Results.deliver` calls that function, on the engine's thread instead of this one.
    """
    try:
        result = work()
    except Exception as error:
        failure = error

        def fail() -> None:
            raise failure

        return fail
    return lambda: done(result)
