"""Coroutines that begin outside of a task: what a task that goes on with them gets of them."""

from __future__ import annotations

import asyncio

import pytest

from router.http.eager import go_on


async def doubled(future: asyncio.Future[int]) -> int:
    try:
        return 2 * await future
    except ValueError:
        return 2 * await asyncio.shield(future.get_loop().create_task(three()))


async def three() -> int:
    await asyncio.sleep(0)
    return 3


async def test_its_result_comes_when_what_it_waits_for_does() -> None:
    future = asyncio.get_running_loop().create_future()
    begun = doubled(future)
    task = asyncio.create_task(asyncio.wait_for(go_on(begun, begun.send(None)), 30))
    await asyncio.sleep(0)
    future.set_result(4)
    assert await task == 8


async def test_it_hears_of_an_error_and_may_wait_again() -> None:
    future = asyncio.get_running_loop().create_future()
    begun = doubled(future)
    awaited = begun.send(None)
    future.set_exception(ValueError)
    assert await go_on(begun, awaited) == 6


async def test_it_is_cancelled_with_its_task() -> None:
    begun = doubled(asyncio.get_running_loop().create_future())
    task = asyncio.ensure_future(go_on(begun, begun.send(None)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
