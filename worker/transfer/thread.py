"""The threads where KV is packed, digested, verified and unpacked.

Neither a step nor the event loop waits for a copy.  There is one such thread where the host copies,
and a few where a device copies and they only wait for it.  They read only blocks that are computed
and write only blocks that are reserved.  No step writes to either, so all threads share the cache
without a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

Args = TypeVarTuple("Args")
R = TypeVar("R")


class Copies:
    """Runs copies in the order in which they are asked for, off the event loop.

    Attributes:
        num_at_once: how many run at a time.
    """

    def __init__(self, num_at_once: int = 1) -> None:
        self.num_at_once = num_at_once
        self._threads = ThreadPoolExecutor(num_at_once, thread_name_prefix="kv-copy")

    async def run(self, copy: Callable[[*Args], R], *args: *Args) -> R:
        """Run `copy` on a transfer thread and return what it returns."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, copy, *args)

    def close(self) -> None:
        """Stop after the copies that are running; those that wait are dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)
