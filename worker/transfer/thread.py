"""Threads that pack, digest, verify and unpack KV, so that neither a step nor the loop waits.

There is one where the host copies, a few where they only wait for a device, and one for each
segment connection.  They read computed blocks and write reserved ones.  No step writes to either,
so all threads share the cache without a lock.

Loop and threads wake each other by a byte in a pipe.  A queue, or `call_soon_threadsafe`, would
hold the GIL meanwhile: on few cores the woken thread takes the core and then waits for the GIL.
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

# Packed, or hashed and written, in some 50 us.
SMALL_BYTES: Final = 256 << 10
Job = tuple["asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class LoopCalls:
    """Runs calls from other threads on the event loop."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._loop.add_reader(self._read_end, self.deliver)

    def post(self, call: Callable[[], None]) -> None:
        """Queue `call` for the loop, in order.  From any thread."""
        self._calls.append(call)
        with suppress(BlockingIOError):  # full: the loop will look
            os.write(self._write_end, b"\0")

    def deliver(self) -> None:
        """Run the queued calls now, on the loop."""
        with suppress(BlockingIOError):
            os.read(self._read_end, 4096)
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception:  # the other calls are still made
                log.exception("a call from another thread failed")
            del call  # keep its arguments no longer

    def close(self) -> None:
        """Run the queued calls and accept no more, after the threads have ended."""
        self.deliver()
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        os.close(self._write_end)


class Copies:
    """Runs copies in order on `num_at_once` threads, those up to `small_bytes` on the loop."""

    def __init__(self, num_at_once: int = 1, small_bytes: int = 0) -> None:
        self.num_at_once = num_at_once
        self._small_bytes = small_bytes
        self._is_closing = False
        self._num_pending = 0
        self._jobs: deque[Job | None] = deque()  # as many as there are bytes in their pipe
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
        """Run `copy` of `num_bytes` and return its result.

        A small one runs here if no other waits: waking a thread takes longer.
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
        """Stop after the running copies; drop those that wait."""
        self._is_closing = True
        for _ in self._threads:
            self._put(None)

    def join(self) -> None:
        """Wait until it has stopped; on any thread."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Stop, wait for the threads, and close the pipes."""
        if not self._is_closing:
            self.stop()
        self.join()
        self._calls.close()
        for end in self._pipe:
            os.close(end)

    def _put(self, job: Job | None) -> None:
        self._jobs.append(job)
        os.write(self._pipe[1], b"\0")

    def _take(self) -> Job | None:
        os.read(self._pipe[0], 1)
        return self._jobs.popleft()

    def _main(self) -> None:
        while (job := self._take()) is not None:
            future, copy, args = job
            result, error = None, None
            try:
                if self._is_closing:
                    raise asyncio.CancelledError
                result = copy(*args)
            except BaseException as problem:
                error = problem
            self._calls.post(partial(_settle, future, result, error))
            del job, future, copy, args, result, error  # keep no buffer until the next copy


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, asyncio.CancelledError):
        future.cancel()
    else:
        future.set_exception(error)
