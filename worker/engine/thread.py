"""The engine's thread: it runs posted calls between steps and delivers the outputs of each step.

The event loop never computes and never waits for a step.  An idle engine checks its blocks, then
sleeps until a call comes or a deadline passes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from worker.engine.engine import Engine
from worker.engine.outputs import Output

Call = Callable[[Engine], object]
_NAME: Final = "engine"

log = structlog.get_logger("worker")


class EngineThread:
    """Runs an engine until `stop`, or until an exception, which it passes to `on_crash`.

    `deliver` and `on_crash` run on the engine's thread.  After a crash, posted calls are dropped;
    the process is expected to end.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[Output]], object],
        on_crash: Callable[[BaseException], object],
    ) -> None:
        self.engine = engine
        engine.announce = deliver
        if engine.tiering is not None:  # a copy that ends wakes the thread
            engine.tiering.store.results.wake = lambda: self.post(_look)
        self._deliver = deliver
        self._on_crash = on_crash
        self._wake = threading.Condition()
        self._calls: deque[Call] = deque()
        self._is_stopping = False
        self._is_busy = False
        self._thread = threading.Thread(target=self._main, name=_NAME, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Call) -> None:
        """Queue `call(engine)` to run on the engine's thread before the next step, in order.

        Any thread may post; this never waits for a step.
        """
        with self._wake:
            self._calls.append(call)
            self._is_busy = True
            self._wake.notify()

    def stop(self, *, wait_s: float | None = None) -> bool:
        """Stop the thread after the calls and the step that it runs now; drop later calls.

        Wait up to `wait_s` seconds (None: without limit); return whether the thread has ended.
        """
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    @property
    def is_busy(self) -> bool:
        """True while a call or step is running or queued, so that a watchdog expects progress."""
        return self._is_busy

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._on_crash(error)

    def _run(self) -> None:
        while (calls := self._next_calls()) is not None:
            for call in calls:
                call(self.engine)
            if self.engine.has_work():
                outputs = self.engine.step()
                if outputs:
                    self._deliver(outputs)

    def _next_calls(self) -> list[Call] | None:
        """Return the calls posted since the last step, None to stop; sleep while idle."""
        if not self.engine.has_work():
            self._rest()
        with self._wake:
            if self._is_stopping:
                return None
            calls = list(self._calls)
            self._calls.clear()
            return calls

    def _rest(self) -> None:
        with self._wake:
            is_idle = not self._calls and not self._is_stopping
        if is_idle:  # without the lock, so that the loop can post
            self.engine.check()
        with self._wake:
            while not self._calls and not self._is_stopping and not self.engine.has_work():
                self._is_busy = False
                self._wake.wait(self.engine.idle_s())
            self._is_busy = True


def _look(engine: Engine) -> None:
    """Do nothing; the thread then looks whether there is work."""


class Warmup:
    """The first call on the engine's thread: runs the `warm_ups` in turn, then `on_end`.

    A warmup may compile for minutes and cannot be interrupted; a worker that stops does not wait
    for it.

    Attributes:
        is_over: The warmup has succeeded or failed.
        is_done: The warmup has succeeded, so the worker can serve.
    """

    def __init__(
        self,
        warm_ups: Sequence[Callable[[], None]],
        clock: Callable[[], float],
        on_end: Callable[[], object],
    ) -> None:
        self.is_over = self.is_done = False
        self._warm_ups, self._clock, self._on_end = warm_ups, clock, on_end

    def run(self, _: object = None) -> None:
        started_s = self._clock()
        log.info("warming up")
        try:
            for warm_up in self._warm_ups:
                warm_up()
            self.is_done = True
            log.info("warmed up", seconds=round(self._clock() - started_s, 3))
        except Exception as error:
            log.error("the warmup failed", reason=f"{type(error).__name__}: {error}")
            raise
        finally:
            self.is_over = True
            self._on_end()


class Pulse:
    """A liveness probe for systemd's watchdog: posts an empty call and checks whether it ran."""

    def __init__(self, post: Callable[[Call], None]) -> None:
        self._post = post
        self._has_run = True

    def is_felt(self) -> bool:
        """Return whether the last empty call has run; if so, post another."""
        if not self._has_run:
            return False
        self._has_run = False
        self._post(self._mark_run)
        return True

    def _mark_run(self, _: object) -> None:
        self._has_run = True


class Standstill:
    """Measures for how many `seconds` the engine has been in the same step.

    It adds up ticks of the event loop, so that a pause of the whole process does not count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._step: int | None = None  # the current one at the last tick

    def tick(self, elapsed_s: float, steps: int, *, is_busy: bool) -> None:
        """Update the measurement, `elapsed_s` after the last tick and `steps` completed steps."""
        step = steps if is_busy else None
        is_same = step is not None and step == self._step
        self.seconds = self.seconds + elapsed_s if is_same else 0.0
        self._step = step


def is_computing() -> bool:
    """Return whether this process has a running engine thread."""
    return any(thread.name == _NAME for thread in threading.enumerate())
