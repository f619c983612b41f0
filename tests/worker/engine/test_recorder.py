"""An engine on a hand-moved clock reports chunks, steps, stalls and preemptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.worker.engine.hashed import engine_of, of_kind, text
from wire.options import Options
from wire.timeline import Entry, Kind
from worker.engine.engine import Engine
from worker.engine.outputs import Output, Timed, Token
from worker.engine.recorder import MAX_STEPS
from worker.engine.sequence import Sequence

TIMED = Options(ignore_eos=True, timeline=True)


class Clock:
    """Stands still while the host works; a step of the executor takes `next_s()`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.next_s: Callable[[], float] = lambda: 0.01

    def __call__(self) -> float:
        return self.now


def timed_engine(**settings: Any) -> tuple[Engine, Clock]:
    clock = Clock()
    engine = engine_of(clock=clock, **settings)
    forward = engine._executor.forward  # noqa: SLF001

    def slow_forward(batch: Any) -> Any:
        clock.now += clock.next_s()
        return forward(batch)

    engine._executor.forward = slow_forward  # type: ignore[method-assign]  # noqa: SLF001
    return engine, clock


def drain(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def entries_of(outputs: list[Output], request_id: int) -> list[list[Entry]]:
    return [it.entries for it in of_kind(outputs, Timed) if it.request_id == request_id]


def near(kind: Kind, start_s: float, duration_s: float, amount: int) -> Any:
    """Equal to an entry of which only the last digits of the times differ."""
    return (kind, pytest.approx(start_s), pytest.approx(duration_s), amount)


def of(entries: list[Entry], kind: Kind) -> list[Entry]:
    return [it for it in entries if it.kind is kind]


def test_chunks_come_before_the_first_token_and_steps_before_the_last() -> None:
    engine, clock = timed_engine(max_ubatch_tokens=5)
    clock.now = 3.0
    engine.add(Sequence(1, range(10, 22), TIMED, 6))
    outputs = drain(engine)
    read, decoded = entries_of(outputs, 1)
    kinds = [type(it) for it in outputs if isinstance(it, Timed | Token)]
    assert kinds == [Timed, Token, Token, Token, Token, Token, Timed, Token]
    assert read == [
        near(Kind.PREFILL, 3.0, 0.03, 3),
        near(Kind.CHUNK, 3.0, 0.01, 5),
        near(Kind.CHUNK, 3.01, 0.01, 5),
        near(Kind.CHUNK, 3.02, 0.01, 2),
    ]
    assert decoded[0] == near(Kind.DECODE, 3.03, 0.05, 5)
    assert [it.duration_s for it in decoded[1:]] == pytest.approx([0.01, 0.01, 0.01])
    assert not of(decoded, Kind.STALL)


def test_a_stall_names_the_prompt_tokens_of_its_step() -> None:
    engine, clock = timed_engine(max_ubatch_tokens=64)
    engine.add(Sequence(1, range(10, 14), TIMED, 40))
    outputs: list[Output] = []
    while len(of_kind(outputs, Token)) < 20:
        outputs += engine.step()
    engine.add(Sequence(2, range(30), Options(ignore_eos=True), 1))
    before = clock.now
    clock.next_s = lambda: 0.5
    outputs += engine.step()
    clock.next_s = lambda: 0.01
    outputs += drain(engine)
    decoded = entries_of(outputs, 1)[-1]
    assert of(decoded, Kind.STALL) == [near(Kind.STALL, before, 0.5, 30)]
    assert of(decoded, Kind.STEP_MAX)[0].duration_s == pytest.approx(0.5)
    assert of(decoded, Kind.STEP_P50)[0].duration_s == pytest.approx(0.01)
    assert not entries_of(outputs, 2), "it did not ask"


def test_a_preemption_names_who_got_the_blocks_and_its_time_is_no_step() -> None:
    engine, _ = timed_engine(num_blocks=9)
    for request_id in range(3):
        engine.add(Sequence(request_id, [request_id] * 9, TIMED, 20))
    outputs = drain(engine)
    away = {
        request_id: of(entries_of(outputs, request_id)[-1], Kind.PREEMPTION)
        for request_id in range(3)
    }
    assert not away[0] and away[2], "the last in order is preempted first"
    assert all(it.amount in (0, 1, 2) and it.duration_s > 0 for it in away[2])
    num_steps = of(entries_of(outputs, 2)[-1], Kind.DECODE)[0].amount
    assert num_steps <= 19 + len(away[2]), "a step for a token, and one to compute the rest again"
    assert len(text(outputs, 2)) == 20


def test_a_reservation_counts_its_steps_from_the_beginning_of_its_decoding() -> None:
    engine, clock = timed_engine()
    engine.reserve(1, range(10, 22), "prefill-0-1")
    engine.step()
    clock.now = 7.0
    engine.let_others_pass(1)
    engine.begin_decode(1, [*range(10, 22), 5], TIMED, 3)
    outputs = drain(engine)
    [decoded] = entries_of(outputs, 1)
    assert decoded[0] == near(Kind.DECODE, 7.0, 0.03, 3)


def test_the_log_of_steps_is_bounded() -> None:
    engine, clock = timed_engine()
    recorder = engine._recorder  # noqa: SLF001
    for _ in range(3 * MAX_STEPS):
        clock.now += 0.001
        recorder.on_commit([], clock.now)
    assert MAX_STEPS <= len(recorder._ends) <= 2 * MAX_STEPS  # noqa: SLF001
    sequence = Sequence(1, [1], TIMED)
    sequence.started_s = 0.0005
    [timed] = recorder.on_commit([sequence], clock.now + 0.001)
    assert of(timed.entries, Kind.DECODE)[0].amount == MAX_STEPS
    assert of(timed.entries, Kind.STEP_P99)[0].duration_s == pytest.approx(0.001)
