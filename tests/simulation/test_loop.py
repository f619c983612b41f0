"""Virtual time passes in order; stopped processes are late, killed ones are gone."""

from __future__ import annotations

import asyncio

from tests.simulation.loop import Process, Timeline, new_process


def run(timeline: Timeline, until: float) -> None:
    while timeline.next_s <= until:
        timeline.step()


def sleeper(timeline: Timeline, name: str, *pauses_s: float) -> tuple[Process, list[float]]:
    """A process that sleeps again and again, and when it woke."""
    process, woke = new_process(timeline, name), list[float]()

    async def sleep() -> None:
        for pause_s in pauses_s:
            await asyncio.sleep(pause_s)
            woke.append(timeline.now)

    timeline.after(0.0, process, lambda: process.create_task(sleep()))
    return process, woke


def test_time_jumps_from_event_to_event() -> None:
    timeline = Timeline()
    _, woke = sleeper(timeline, "one", 1.0, 3600.0)
    run(timeline, 1e9)
    assert woke == [1.0, 3601.0]


def test_events_of_one_moment_happen_in_the_order_of_planning() -> None:
    timeline, order = Timeline(), list[int]()
    for number in range(5):
        timeline.at(1.0, None, order.append, number)
    timeline.at(0.5, None, order.append, 9)
    run(timeline, 2.0)
    assert order == [9, 0, 1, 2, 3, 4]


def test_a_stopped_process_is_late_and_no_other() -> None:
    timeline = Timeline()
    process, woke = sleeper(timeline, "one", 1.0, 1.0)
    _, woke_other = sleeper(timeline, "other", 1.0, 1.0)
    timeline.at(0.5, None, process.stop_running)
    timeline.at(7.0, None, process.go_on)
    run(timeline, 100.0)
    assert woke == [7.0, 8.0] and woke_other == [1.0, 2.0]
    assert process.stops == [(0.5, 7.0)]


def test_a_killed_process_has_no_task_and_does_nothing_more() -> None:
    timeline = Timeline()
    process, woke = sleeper(timeline, "one", 1.0, 1.0)
    timeline.at(1.5, None, process.kill)
    run(timeline, 100.0)
    assert woke == [1.0] and process.tasks == []


def test_timeouts_and_exceptions_are_noticed() -> None:
    timeline = Timeline()
    process, seen = new_process(timeline, "one"), list[float]()

    async def wait() -> None:
        try:
            async with asyncio.timeout(2.0):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append(timeline.now)

    timeline.after(0.0, process, lambda: process.create_task(wait()))
    timeline.after(5.0, process, lambda: process.call_soon(lambda: 1 // 0))
    run(timeline, 10.0)
    assert seen == [2.0]
    assert len(process.problems) == 1 and "ZeroDivisionError" in process.problems[0]
