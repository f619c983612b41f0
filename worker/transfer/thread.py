"""Threads that pack, hash, verify and unpack KV, so that engine steps and the event loop do not.

There is one thread if the CPU copies, and a few if they only wait for a device.  Each outgoing
segment connection has another one.  The threads read blocks whose KV is computed and write blocks
that are allocated for incoming KV.  No engine step writes to these blocks, so the threads share
the cache without a lock.

The event loop and the threads wake each other by writing a byte to a pipe.  A `queue.Queue` or
`call_soon_threadsafe` would be slower: they wake the other thread while holding the GIL, so on
a machine with few cores it takes over the core only to wait for the GIL.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple

import structlog

log = structlog.get_logger("worker")
Args = TypeVarTuple("Args")
R = TypeVar("R")

# A copy of this size takes about 50 us, hashing included.
SMALL_BYTES: Final = 256 << 10
Job = tuple["asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class LoopCalls:
    """Runs functions on the event loop that other threads post."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._loop.add_reader(self._read_end, self.deliver)

    def post(self, call: Callable[[], None]) -> None:
        """Queue `call` to run on the loop, in order.  Thread-safe."""
        self._calls.append(call)
        with suppress(BlockingIOError):  # the pipe is full: the loop will wake anyway
            os.write(self._write_end, b"\0")

    def deliver(self) -> None:
        """Run the queued calls now; only the event loop's thread may call this."""
        with suppress(BlockingIOError):
            os.read(self._read_end, 4096)
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception:  # the other calls must still run
                log.exception("a call from another thread failed")
            del call  # releases the buffers among its arguments

    def close(self) -> None:
        """Run the queued calls and close the pipe; the threads must have ended."""
        self.deliver()
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        os.close(self._write_end)


class Copies:
    """Runs copies, in order, on `num_at_once` threads; `run` may do small ones itself."""

    def __init__(self, num_at_once: int = 1, small_bytes: int = 0) -> None:
        self.num_at_once = num_at_once
        self._small_bytes = small_bytes
        self._is_closing = False
        self._num_pending = 0
        self._jobs: deque[Job | None] = deque()  # the pipe has one byte per queued job
        self._loop = asyncio.get_running_loop()
        self._calls = LoopCalls()
        try:
            self._pipe = os.pipe()
        except OSError:
            self._calls.close()
            raise
        self._threads = [
            threading.Thread(target=self._main, name=f"kv-copy_{number}", daemon=True)
            for number in range(num_at_once)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, copy: Callable[[*Args], R], *args: *Args, num_bytes: int) -> R:
        """Run `copy(*args)`, which copies `num_bytes`, on a thread and return its result.

        A copy of up to `small_bytes` runs on the event loop if no other copy is pending, because
        waking a thread would take longer.
        """
        if num_bytes <= self._small_bytes and not self._num_pending:
            return copy(*args)
        future: asyncio.Future[R] = self._loop.create_future()
        self._num_pending += 1
        try:
            self._put((future, copy, args))
            return await future
        finally:
            self._num_pending -= 1

    def stop(self) -> None:
        """Stop the threads after their current copies; cancel the queued ones."""
        self._is_closing = True
        for _ in self._threads:
            self._put(None)

    def join(self) -> None:
        """Wait until all threads have ended.  Thread-safe."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Stop the threads, wait for them, and close the pipes."""
        if not self._is_closing:
            self.stop()
        self.join()
        self._calls.close()
        for end in self._pipe:
            os.close(end)

    def _put(self, job: Job | None) -> None:
        self._jobs.append(job)
        os.write(self._pipe[1], b"\0")

    def _next_job(self) -> Job | None:
        os.read(self._pipe[0], 1)
        return self._jobs.popleft()

    def _main(self) -> None:
        while (job := self._next_job()) is not None:
            future, copy, args = job
            result, error = None, None
            try:
                if self._is_closing:
                    raise asyncio.CancelledError
                result = copy(*args)
            except BaseException as problem:
                error = problem
            self._calls.post(partial(_set_outcome, future, result, error))
            del job, future, copy, args, result, error  # releases buffers before the next wait


def _set_outcome(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, asyncio.CancelledError):
        future.cancel()
    else:
        future.set_exception(error)
