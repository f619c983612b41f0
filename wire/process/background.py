"""Work mostly without the GIL, done at a low priority: event loop and engine come first.

Without that, threads that compile structures get as much of a busy core as the engine, each step of
which waits for a time slice of every one of them.  A thread that held the GIL for long at a low
priority would hold up all threads of the process, for as long as other processes have the cores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

# Of `nice`: beside a thread of the usual priority, one of this gets a tenth of the time.
STEPS_BACK: Final = 10


def _step_back() -> None:
    if sys.platform == "linux":  # elsewhere `nice` is for the whole process
        os.nice(STEPS_BACK)


# At least five; the threads that ask, and wait meanwhile, are four at most.
_THREADS: Final = ThreadPoolExecutor(None, "background", _step_back)


def in_background(work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises; the caller waits."""
    return _THREADS.submit(work).result()
