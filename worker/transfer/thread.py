"""The transfer threads: where KV is packed, digested, verified and unpacked.

Threads beside the engine's, so that neither a step nor the event loop waits for a copy: one where
the host copies, a few where a device does and they only wait for it.  They only read blocks that
are computed and only write blocks that are reserved, and no step touches either, so all threads
share the cache without a lock.
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
