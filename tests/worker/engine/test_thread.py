"""The engine on a real thread: calls in, outputs out, idle without spinning, one crash report.

The warmup says when it is over.  A pulse is felt while the thread takes calls, and not while a call
or a step hangs; a standstill is as long as the step under way, and there is none between steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.cluster import until
from wire.options import Options
from worker.engine.engine import Engine, OpenTiers
from worker.engine.outputs import Failed, Output, Reserved, Started, Token
from worker.engine.sequence import Sequence
from worker.engine.thread import EngineThread, Pulse, Standstill, Warmup, is_computing
from worker.executor.batch import Batch
from worker.executor.hash import HashExecutor, create
from worker.tiers.opening import TierSettings

TIMEOUT_S = 20.0
GREEDY = Options(ignore_eos=True)


class Owner:
    """A worker's use of its engine thread, on plain queues."""

    def __init__(
        self, executor: HashExecutor | None = None, open_tiers: OpenTiers | None = None
    ) -> None:
        self.engine = Engine(executor or create(), num_blocks=64, block_size=4)
        if open_tiers is not None:
            self.engine.seconds_to_compute = lambda num_tokens: None  # type: ignore[method-assign]
            self.engine.add_tiers(open_tiers)
        self.outputs: Queue[Output] = Queue()
        self.crashes: Queue[BaseException] = Queue()
        self.idle = threading.Event()
        self.num_checks = 0
        check = self.engine.check

        def watched_check() -> None:
            check()
            self.num_checks += 1
            self.idle.set()

        self.engine.check = watched_check  # type: ignore[method-assign]
        self.thread = EngineThread(self.engine, self._deliver, self.crashes.put)

    def _deliver(self, outputs: list[Output]) -> None:
        assert outputs, "nothing to say"
        for output in outputs:
            self.outputs.put(output)

    def add(
        self, request_id: int, prompt: list[int], limit: int, *, transfer: bool = False
    ) -> None:
        self.thread.post(
            lambda engine: engine.add(
                Sequence(request_id, prompt, GREEDY, limit, transfer=transfer)
            )
        )

    def text(self, num_requests: int = 1) -> dict[int, list[int]]:
        """Collect tokens until so many requests have ended."""
        texts: dict[int, list[int]] = {}
        while num_requests:
            output = self.outputs.get(timeout=TIMEOUT_S)
            if isinstance(output, Token):
                texts.setdefault(output.request_id, []).append(output.token_id)
                num_requests -= output.finish_reason is not None
        return texts

    def ask(self, question: Callable[[Engine], object]) -> object:
        answers: Queue[object] = Queue()
        self.thread.post(lambda engine: answers.put(question(engine)))
        return answers.get(timeout=TIMEOUT_S)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.thread.stop()
    assert owner.crashes.empty()


def test_a_deadline_wakes_an_engine_that_waits_for_blocks(owner: Owner) -> None:
    owner.thread.start()
    owner.ask(lambda engine: engine.reserve(1, range(64 * 4 - 1), is_claimed=True))
    late = Sequence(2, [5] * 9, Options(deadline_ms=30))
    owner.thread.post(lambda engine: engine.add(late))
    outputs = [owner.outputs.get(timeout=TIMEOUT_S) for _ in range(2)]
    assert [type(output) for output in outputs] == [Reserved, Failed]


def test_an_idle_engine_is_checked_once_and_then_left_alone(owner: Owner) -> None:
    owner.thread.start()
    assert owner.idle.wait(TIMEOUT_S)
    owner.idle.clear()
    owner.add(1, [5] * 6, 8)
    owner.text()
    assert owner.idle.wait(TIMEOUT_S)
    steps, checks = owner.engine.steps, owner.num_checks
    assert owner.ask(lambda engine: engine.steps) == steps == 8
    assert owner.num_checks <= checks + 1


class GatedExecutor(HashExecutor):
    """Waits inside the forward until it is let on."""

    def __init__(self) -> None:
        super().__init__(create().info)
        self.entered = threading.Event()
        self.gate = threading.Event()

    def forward(self, batch: Batch) -> list[int]:
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        return super().forward(batch)


def test_an_admission_is_heard_while_its_batch_is_computed() -> None:
    executor = GatedExecutor()
    owner = Owner(executor)
    assert not owner.thread.is_busy
    owner.thread.start()
    owner.add(1, [5] * 6, 1, transfer=True)
    assert executor.entered.wait(TIMEOUT_S)
    assert isinstance(owner.outputs.get(timeout=TIMEOUT_S), Started)
    assert owner.outputs.empty() and owner.thread.is_busy
    executor.gate.set()
    owner.text()
    owner.thread.stop()


def test_stop_waits_for_the_step_under_way_and_takes_no_more_calls() -> None:
    executor = GatedExecutor()
    owner = Owner(executor)
    owner.thread.start()
    owner.add(1, [5] * 6, 9)
    assert executor.entered.wait(TIMEOUT_S)
    owner.add(2, [5] * 6, 9)
    stopper = threading.Thread(target=owner.thread.stop)
    stopper.start()
    executor.gate.set()
    stopper.join(TIMEOUT_S)
    assert not stopper.is_alive() and owner.engine.steps <= 1
    assert owner.engine.num_running + owner.engine.num_waiting <= 1
    owner.thread.stop()


def test_stop_need_not_wait_for_the_current_call(owner: Owner) -> None:
    assert not is_computing()
    entered, go_on, late = threading.Event(), threading.Event(), threading.Event()

    def hang(_: Engine) -> None:
        entered.set()
        go_on.wait(TIMEOUT_S)

    owner.thread.start()
    owner.thread.post(hang)
    assert entered.wait(TIMEOUT_S)
    owner.thread.post(lambda _: late.set())
    owner.thread.stop(wait_s=0.0)
    assert is_computing()
    go_on.set()
    owner.thread.stop()
    assert not is_computing() and not late.is_set()


class BrokenExecutor(HashExecutor):
    def forward(self, batch: Batch) -> list[int]:
        raise RuntimeError("device lost")


def test_a_crash_is_told_once_and_ends_the_thread() -> None:
    owner = Owner(BrokenExecutor(create().info))
    owner.thread.start()
    owner.add(1, [5] * 6, 3)
    assert str(owner.crashes.get(timeout=TIMEOUT_S)) == "device lost"
    owner.add(2, [5] * 6, 3)
    owner.thread.stop()
    assert owner.crashes.empty()


def test_lost_blocks_are_a_crash_when_the_engine_goes_idle() -> None:
    owner = Owner()
    owner.engine.pool.allocate(1)
    owner.thread.start()
    assert isinstance(owner.crashes.get(timeout=TIMEOUT_S), AssertionError)
    owner.thread.stop()


class Stage:
    """Two models and a clock that goes on while they warm up, and what the warmup was then."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.now_s = 100.0
        self.heard: list[tuple[bool, bool]] = []
        self.warmup = Warmup([self._load, self._warm_up], lambda: self.now_s, self._on_end)
        self._error = error

    def _load(self) -> None:
        self.now_s += 0.5

    def _warm_up(self) -> None:
        assert not self.warmup.is_over
        self.now_s += 2.5
        if self._error is not None:
            raise self._error

    def _on_end(self) -> None:
        self.heard.append((self.warmup.is_over, self.warmup.is_done))


def test_a_warmup_is_done_when_the_models_return() -> None:
    stage = Stage()
    with capture_logs() as logs:
        stage.warmup.run()
    assert stage.heard == [(True, True)]
    assert logs == [
        {"event": "warming up", "log_level": "info"},
        {"event": "warmed up", "seconds": 3.0, "log_level": "info"},
    ]


def test_a_warmup_that_raises_is_over_and_not_done() -> None:
    stage = Stage(MemoryError("no room"))
    with capture_logs() as logs, pytest.raises(MemoryError):
        stage.warmup.run()
    assert stage.heard == [(True, False)]
    _, line = logs
    assert (line["event"], line["reason"]) == ("the warmup failed", "MemoryError: no room")


class Hung:
    """A thread that keeps what it is asked until it is let go."""

    def __init__(self) -> None:
        self.calls: list[Callable[[Any], object]] = []

    def post(self, call: Callable[[Any], object]) -> None:
        self.calls.append(call)


def test_a_pulse_is_lost_until_the_thread_answers() -> None:
    thread = Hung()
    pulse = Pulse(thread.post)
    assert pulse.is_felt()
    assert not pulse.is_felt()
    assert not pulse.is_felt()
    assert len(thread.calls) == 1, "one question at a time: a hung thread's calls must not pile up"
    thread.calls.pop()(None)
    assert pulse.is_felt()


def test_a_standstill_grows_with_the_step_and_ends_with_it() -> None:
    standstill = Standstill()
    seconds = []
    for steps, is_busy in ((0, False), (0, True), (0, True), (1, True), (1, True), (1, False)):
        standstill.tick(0.5, steps, is_busy=is_busy)
        seconds.append(standstill.seconds)
    assert seconds == [0.0, 0.0, 0.5, 0.0, 0.5, 0.0]


def test_a_copy_that_ends_wakes_an_idle_engine(tmp_path: Path) -> None:
    tiers = TierSettings(0, tmp_path, 1 << 20, "decode-0", ("m",), 64, None, time.monotonic)
    owner = Owner(open_tiers=tiers.open)
    owner.thread.start()
    prompt = list(range(40))
    owner.add(1, prompt, 2)
    first = owner.text()[1]
    tiering = owner.engine.tiering
    assert tiering is not None
    until(lambda: tiering.figures().disk.blocks == 10, "written, although nothing is asked")
    owner.thread.post(lambda engine: engine.pool.free(engine.pool.allocate(64)))
    owner.add(2, prompt, 2)
    assert owner.text()[2] == first and tiering.figures().disk.loaded_tokens >= 36
    assert owner.thread.stop(wait_s=TIMEOUT_S) and owner.crashes.empty()
    owner.engine.close_tiers(TIMEOUT_S)
