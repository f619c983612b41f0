"""A pulse is felt while the engine's thread takes calls, and not while a call or a step hangs.

A standstill is as long as the step under way, and there is none between steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from worker.engine.engine import Engine
from worker.engine.thread import EngineThread
from worker.executor.hash import create
from worker.pulse import Pulse, Standstill


class Hung:
    """A thread that keeps what it is asked until it is let go."""

    def __init__(self) -> None:
        self.calls: list[Callable[[object], object]] = []

    def post(self, call: Callable[[object], object]) -> None:
        self.calls.append(call)


def test_it_is_lost_until_the_thread_answers() -> None:
    thread = Hung()
    pulse = Pulse(thread)
    assert pulse.is_felt()
    assert not pulse.is_felt()
    assert not pulse.is_felt()
    assert len(thread.calls) == 1, "one question at a time: a hung thread's calls must not pile up"
    thread.calls.pop()(None)
    assert pulse.is_felt()


def test_a_real_engine_that_hangs_in_a_call_and_comes_back() -> None:
    engine = Engine(create(model_path=None), num_blocks=8, block_size=16)
    thread = EngineThread(engine, lambda outputs: None, lambda error: None)
    pulse = Pulse(thread)
    hanging, go_on, idle = threading.Event(), threading.Event(), threading.Event()

    def hang(_: Engine) -> None:
        hanging.set()
        go_on.wait()

    thread.start()
    try:
        thread.post(hang)
        assert hanging.wait(10)
        assert pulse.is_felt()
        assert not pulse.is_felt()
        go_on.set()
        thread.post(lambda _: idle.set())  # behind the question: then it has been answered
        assert idle.wait(10)
        assert pulse.is_felt()
    finally:
        go_on.set()
        thread.stop()


def test_a_standstill_grows_with_the_step_and_ends_with_it() -> None:
    standstill = Standstill()
    seconds = []
    for steps, is_busy in ((0, False), (0, True), (0, True), (1, True), (1, True), (1, False)):
        standstill.tick(0.5, steps, is_busy=is_busy)
        seconds.append(standstill.seconds)
    assert seconds == [0.0, 0.5, 1.0, 0.0, 0.5, 0.0]
