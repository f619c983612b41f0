"""The transfer thread: one copy at a time, off the loop, errors to who asked."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest

from worker.transfer.thread import Copies


async def test_copies_run_in_order_on_one_thread_of_their_own() -> None:
    copies, order = Copies(), list[int]()
    threads = set[str]()

    def copy(number: int) -> int:
        order.append(number)
        threads.add(threading.current_thread().name)
        return number * 2

    assert await asyncio.gather(*(copies.run(copy, i) for i in range(20))) == list(range(0, 40, 2))
    assert order == list(range(20))
    assert len(threads) == 1 and threads != {threading.current_thread().name}
    copies.close()


async def test_as_many_run_at_once_as_were_asked_for() -> None:
    copies, together = Copies(3), threading.Barrier(3)
    assert copies.num_at_once == 3
    found = await asyncio.gather(*(copies.run(together.wait, 10) for _ in range(6)))
    assert sorted(found) == [0, 0, 1, 1, 2, 2]
    copies.close()


async def test_the_loop_runs_while_a_copy_does() -> None:
    copies, gate = Copies(), threading.Event()
    task = asyncio.create_task(copies.run(gate.wait, 10))
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    assert await task
    copies.close()


async def test_an_error_comes_back() -> None:
    copies = Copies()
    with pytest.raises(ZeroDivisionError):
        await copies.run(lambda: 1 // 0)
    copies.close()


async def test_what_waits_at_the_end_is_dropped() -> None:
    copies, is_running, gate = Copies(), threading.Event(), threading.Event()

    def copy() -> bool:
        is_running.set()
        return gate.wait(10)

    running = asyncio.create_task(copies.run(copy))
    waiting = asyncio.create_task(copies.run(copy))
    await asyncio.to_thread(is_running.wait, 10)
    threading.Timer(0.01, gate.set).start()
    copies.close()  # waits for the first
    with pytest.raises(asyncio.CancelledError):
        await waiting
    running.cancel()


async def test_results_are_not_kept_by_the_thread() -> None:
    copies = Copies()

    class Result: ...

    result = weakref.ref(await copies.run(Result))
    await asyncio.sleep(0)
    assert result() is None
    copies.close()
