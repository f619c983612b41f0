"""The transfer thread: where KV is packed, digested, verified and unpacked.

One thread beside the engine's, so that neither a step nor the event loop waits for a copy.  It
only reads blocks that are computed and only writes blocks that are reserved, and no step touches
either, so the two threads share the cache without a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

Args = TypeVarTuple("Args")
R = TypeVar("R")


class Copies:
    """Runs copies one after another, off the event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy")

    async def run(self, copy: Callable[[*Args], R], *args: *Args) -> R:
        """Run `copy` on the transfer thread and return what it returns."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, copy, *args)

    def close(self) -> None:
        """Stop after the copy that is running; those that wait are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
