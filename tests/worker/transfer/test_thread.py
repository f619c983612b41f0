"""The transfer thread: one copy at a time, off the loop, errors to who asked."""

from __future__ import annotations

import asyncio
import threading
import weakref
from functools import partial

import pytest
from structlog.testing import capture_logs

from worker.transfer.thread import SMALL_BYTES, Copies, LoopCalls

LARGE = SMALL_BYTES + 1


async def test_copies_run_in_order_on_one_thread_of_their_own() -> None:
    copies, order = Copies(), list[int]()
    threads = set[str]()

    def copy(number: int) -> int:
        order.append(number)
        threads.add(threading.current_thread().name)
        return number * 2

    assert await asyncio.gather(*(copies.run(copy, i, num_bytes=LARGE) for i in range(20))) == list(
        range(0, 40, 2)
    )
    assert order == list(range(20))
    assert len(threads) == 1 and threads != {threading.current_thread().name}
    copies.close()


async def test_as_many_run_at_once_as_were_asked_for() -> None:
    copies, together = Copies(3), threading.Barrier(3)
    assert copies.num_at_once == 3
    found = await asyncio.gather(
        *(copies.run(together.wait, 10, num_bytes=LARGE) for _ in range(6))
    )
    assert sorted(found) == [0, 0, 1, 1, 2, 2]
    copies.close()


async def test_a_small_copy_runs_at_once_unless_others_are_to_run_first() -> None:
    copies, gate, order = Copies(1, SMALL_BYTES), threading.Event(), list[str]()

    def copy(name: str) -> str:
        order.append(name)
        return threading.current_thread().name

    here = threading.current_thread().name
    assert await copies.run(copy, "alone", num_bytes=SMALL_BYTES) == here
    large = asyncio.create_task(copies.run(gate.wait, 10, num_bytes=LARGE))
    await asyncio.sleep(0)
    small = asyncio.create_task(copies.run(copy, "behind", num_bytes=1))
    await asyncio.sleep(0)
    assert order == ["alone"]
    gate.set()
    assert await large and await small != here
    assert await copies.run(copy, "alone", num_bytes=1) == here
    copies.close()
    elsewhere = Copies()
    assert await elsewhere.run(copy, "waits for it", num_bytes=1) != here
    elsewhere.close()


async def test_an_error_comes_back() -> None:
    copies = Copies()
    with pytest.raises(ZeroDivisionError):
        await copies.run(lambda: 1 // 0, num_bytes=LARGE)
    copies.close()


async def test_what_waits_at_the_end_is_dropped() -> None:
    copies, is_running, gate = Copies(), threading.Event(), threading.Event()

    def copy() -> bool:
        is_running.set()
        return gate.wait(10)

    running = asyncio.create_task(copies.run(copy, num_bytes=LARGE))
    waiting = asyncio.create_task(copies.run(copy, num_bytes=LARGE))
    await asyncio.to_thread(is_running.wait, 30)
    copies.stop()
    gate.set()
    copies.close()  # waits for the first
    assert await running
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_results_are_not_kept_by_the_thread() -> None:
    copies = Copies()

    class Result: ...

    gone, loop = asyncio.Event(), asyncio.get_running_loop()
    result = await copies.run(Result, num_bytes=LARGE)
    weakref.finalize(result, loop.call_soon_threadsafe, gone.set)
    del result
    await asyncio.wait_for(gone.wait(), 30)  # though no other copy comes
    copies.close()


async def test_more_calls_than_the_pipe_has_room_for_are_all_made_in_order() -> None:
    calls, made = LoopCalls(), list[int]()
    for number in range(70_000):  # a byte each, and a pipe holds 64 KiB
        calls.post(partial(made.append, number))
    assert not made, "the loop makes them"
    await asyncio.sleep(0)
    calls.close()
    assert made == list(range(70_000))


async def test_a_call_that_fails_takes_no_other_along() -> None:
    calls, made = LoopCalls(), list[int]()
    calls.post(lambda: made.append(1 // 0))
    calls.post(lambda: made.append(2))
    with capture_logs() as logs:
        calls.close()
    assert made == [2] and [line["log_level"] for line in logs] == ["error"]


async def test_a_copy_that_nobody_waits_for_any_more_is_no_error() -> None:
    copies, gate = Copies(), threading.Event()
    running = asyncio.create_task(copies.run(gate.wait, 10, num_bytes=LARGE))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    gate.set()
    with capture_logs() as logs:
        copies.close()
    assert running.cancelled() and not logs
