"""Work that would hold up the loop: where it runs, and how much of it at once."""

from __future__ import annotations

import asyncio
import threading

from router.http.threads import INLINE_BYTES, NUM_LARGE, NUM_ORDINARY, ORDINARY_BYTES, Threads


async def test_small_bodies_need_no_thread() -> None:
    threads = Threads()
    assert await threads.run(INLINE_BYTES, threading.get_ident) == threading.get_ident()
    assert await threads.run(INLINE_BYTES + 1, threading.get_ident) != threading.get_ident()


async def test_large_bodies_wait_for_each_other_and_others_do_not_wait_for_them() -> None:
    threads, go_on, wanted = Threads(), threading.Event(), list[int]()
    running = threading.Semaphore(0)

    def work(number: int) -> None:
        wanted.append(number)
        running.release()
        assert go_on.wait(10)

    async def run(size: int, number: int) -> None:
        await threads.run(size, lambda: work(number))

    asked = [asyncio.create_task(run(ORDINARY_BYTES + 1, number)) for number in range(4)]
    asked += [asyncio.create_task(run(ORDINARY_BYTES, number)) for number in range(10, 14)]
    try:
        for _ in range(NUM_LARGE + NUM_ORDINARY):
            assert await asyncio.to_thread(running.acquire, timeout=10)
        assert sorted(wanted) == [0, 10, 11]
    finally:
        go_on.set()
        await asyncio.gather(*asked)
    assert [number for number in wanted if number < 10] == [0, 1, 2, 3], "in the order they came"
