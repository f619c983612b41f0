"""Threads for what would hold up the event loop: large bodies, whose texts are to be tokenized,
and large answers, with the log-probabilities of many tokens.

Few threads, so that a crowd of large bodies costs the memory and the cores of a few; the others
wait in the order they came.  Ordinary bodies do not wait behind the largest.  What runs here must
release the GIL, or hold it for a few milliseconds at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

# Bodies up to this size are worked on by the loop itself: about a millisecond.
INLINE_BYTES: Final = 16 * 1024
# Up to here it takes some ten milliseconds; far more beyond.
ORDINARY_BYTES: Final = 128 * 1024
NUM_ORDINARY: Final = 2
NUM_LARGE: Final = 1

T = TypeVar("T")


class Threads:
    """Runs `work` by the size of what it works on."""

    def __init__(self) -> None:
        self._ordinary = ThreadPoolExecutor(NUM_ORDINARY, "ordinary-body")
        self._large = ThreadPoolExecutor(NUM_LARGE, "large-body")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return what `work` returns, or raise what it raises."""
        if size <= INLINE_BYTES:
            return work()
        pool = self._ordinary if size <= ORDINARY_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(pool, work)
