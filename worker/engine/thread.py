"""The engine's own thread: it takes calls between steps and delivers what each step says.

The event loop never computes and never waits for a step: it posts, and hears of outputs through
`deliver`, which runs on the engine thread and has to hop to the loop itself.  When the engine has
nothing to do the thread checks that every block is accounted for, then sleeps on a condition, until
a call comes or a deadline passes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from worker.engine.engine import Engine
from worker.engine.outputs import Output

Call = Callable[[Engine], object]
_NAME: Final = "engine"


class EngineThread:
    """Runs an engine until `stop`, or until anything raises: then `on_crash` hears it, once.

    `deliver` and `on_crash` are called on the engine thread.  After a crash nothing is computed any
    more and posted calls are dropped; the process is expected to end.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[Output]], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self.engine = engine
        engine.announce = deliver
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
        """Have `call(engine)` run on the engine thread, before the next step, in order of posting.

        From any thread, never blocks.
        """
        with self._wake:
            self._calls.append(call)
            self._is_busy = True
            self._wake.notify()

    def stop(self, *, wait: bool = True) -> None:
        """End after the call or step under way, and `wait` for that; later calls are dropped."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if wait and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_busy(self) -> bool:
        """Whether a call or a step is under way or waiting: a watchdog then expects progress."""
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
        """Return the calls posted since the last step; wait for one when the engine is idle.

        None means stop.
        """
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
        if is_idle:  # not under the lock: the loop must be able to post meanwhile
            self.engine.check()
        with self._wake:
            while not self._calls and not self._is_stopping and not self.engine.has_work():
                self._is_busy = False
                self._wake.wait(self.engine.idle_s())
            self._is_busy = True


def is_computing() -> bool:
    """Whether an engine's thread of this process is still there."""
    return any(thread.name == _NAME for thread in threading.enumerate())
