"""Threads that pack, digest, verify and unpack KV.

Neither a step nor the event loop waits for a copy that takes long.  There is one such thread where
the host copies, and a few where a device copies and they only wait for it; and one for each
connection for segments alone.  They read only blocks that are computed and write only blocks that
are reserved.  No step writes to either, so all threads share the cache without a lock.

Loop and threads wake each other by a byte in a pipe.  A queue, or `call_soon_threadsafe`, would
hold the GIL meanwhile: where cores are short, who is woken takes the core, then waits for the GIL.
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

# So much is packed, or hashed and written, in some 50 us.
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
            except Exception:  # what others have asked for is not lost
                log.exception("a call from another thread failed")
            del call  # what it was given is not kept until the next

    def close(self) -> None:
        """Run the queued calls and accept no more, after the threads have ended."""
        self.deliver()
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        os.close(self._write_end)


class Copies:
    """Runs copies in the order in which they are asked for, off the event loop.

    Args:
        small_bytes: How much may be copied on the loop.

    Attributes:
        num_at_once: how many run at a time.
    """

    def __init__(self, num_at_once: int = 1, small_bytes: int = 0) -> None:
        self.num_at_once = num_at_once
        self._small_bytes = small_bytes
        self._is_closing = False
        self._num_asked = 0
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
        """Run `copy`, of so many bytes, and return what it returns.

        A small copy that need not wait for others runs here: it takes less time than waking a
        thread, and being woken by it.
        """
        if num_bytes <= self._small_bytes and not self._num_asked:
            return copy(*args)
        future: asyncio.Future[R] = self._loop.create_future()
        self._num_asked += 1
        try:
            self._put((future, copy, args))
            return await future
        finally:
            self._num_asked -= 1

    def stop(self) -> None:
        """Stop after the copies that are running; those that wait are dropped."""
        self._is_closing = True
        for _ in self._threads:
            self._put(None)

    def join(self) -> None:
        """Wait until it has stopped; on any thread."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Stop, wait for that, and free what it takes."""
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
            del job, future, copy, args, result, error  # what was copied is not kept until the next


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return  # nobody waits any more
    if error is None:
        future.set_result(result)
    elif isinstance(error, asyncio.CancelledError):
        future.cancel()
    else:
        future.set_exception(error)
