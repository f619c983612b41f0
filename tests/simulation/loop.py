"""Virtual time, and processes that live in it: one event loop each, all of them in one thread.

`Timeline` holds what is to happen, in order of time, then of planning; nothing here looks at a real
clock, so one seed is one history.  A `Process` is an asyncio event loop of its own: one that is
stopped gets its events late, as after SIGSTOP, and one that is killed never runs again.
"""

from __future__ import annotations

import asyncio
from asyncio import _set_running_loop  # it is for loops such as this one
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Turns a killed process may take to close what it had open; more is a loop without an end.
MAX_LAST_TURNS: Final = 10_000


class Timeline:
    """The events in order of time.  `now` is in virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Process | None, Callable[[], object]]] = []

    def after(
        self, delay_s: float, process: Process | None, callback: Callable[..., object], *args: Any
    ) -> None:
        """Call back in `delay_s`, inside `process`, or for None outside of any."""
        self.at(self.now + delay_s, process, callback, *args)

    def at(
        self, when: float, process: Process | None, callback: Callable[..., object], *args: Any
    ) -> None:
        """As `after`, at a moment."""
        self.num_events += 1
        call = (lambda: callback(*args)) if args else callback
        heappush(self._heap, (max(when, self.now), self.num_events, process, call))

    @property
    def next_s(self) -> float:
        """When the next event is; infinity when there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def step(self) -> Process | None:
        """Let the next event happen; return where it did."""
        self.now, _, process, call = heappop(self._heap)
        if process is None:
            call()
        else:
            process.run(call)
        return process


class Turn(asyncio.TimerHandle):
    """A callback that a process has planned."""

    def run(self) -> None:
        """Call it now; what it raises goes to the handler of exceptions."""
        self._run()


def new_process(timeline: Timeline, name: str) -> Process:
    """Start a process; it does what it is told by events."""
    return Process(timeline, name)  # type: ignore[abstract]  # what our code does not use


class State(Enum):
    RUNNING = auto()
    STOPPED = auto()
    DEAD = auto()


class Process(asyncio.AbstractEventLoop):
    """A process: the part of an event loop that our code uses, on virtual time."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.name = name
        self.state = State.RUNNING
        self.problems: list[str] = []
        self.stops: list[tuple[float, float]] = []  # that are over: from when until when
        self._timeline = timeline
        self._stopped_s = 0.0
        self._ready: deque[Turn] = deque()
        self._late: list[Callable[[], object]] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def run(self, call: Callable[[], object]) -> None:
        """Run one event and all that follows from it at once."""
        if self.state is State.STOPPED:
            self._late.append(call)
        elif self.state is State.RUNNING:
            _set_running_loop(self)
            try:
                call()
                while self._ready:
                    self._ready.popleft().run()
            finally:
                _set_running_loop(None)

    def stop_running(self) -> None:
        """As SIGSTOP does: from now on events wait."""
        if self.state is State.RUNNING:
            self.state, self._stopped_s = State.STOPPED, self._timeline.now

    def go_on(self) -> None:
        """As SIGCONT does: what waited happens now, late."""
        if self.state is State.STOPPED:
            self.state = State.RUNNING
            self.stops.append((self._stopped_s, self._timeline.now))
            late, self._late = self._late, []
            for call in late:
                self._timeline.after(0.0, self, call)

    def kill(self) -> None:
        """End without a word.  Tasks are closed afterwards, heard by nobody, so none is left."""
        self.state = State.DEAD
        self._late.clear()
        _set_running_loop(self)
        try:
            for task in self.tasks:
                task.cancel()
            for _ in range(MAX_LAST_TURNS):
                if not self._ready:
                    return
                self._ready.popleft().run()
        finally:
            _set_running_loop(None)
        raise RuntimeError(f"{self.name} cannot be killed")

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those that are not done."""
        self._tasks = {task: None for task in self._tasks if not task.done()}
        return list(self._tasks)

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self._timeline.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = Turn(self.time(), callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = Turn(when, callback, args, self, context)
        if self.state is State.DEAD:
            self._ready.append(handle)  # its time does not pass any more
        else:
            self._timeline.at(when, self, self._expire, handle)
        return handle

    def _expire(self, handle: Turn) -> None:
        if not handle.cancelled():
            handle.run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays planned and does nothing then."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.state is not State.DEAD:
            self.problems.append(
                f"{self.name}: {context.get('message')} {context.get('exception')!r}"
            )
