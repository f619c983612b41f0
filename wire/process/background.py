"""Run work that releases the GIL on low-priority threads.

Otherwise each step of the engine would wait for the time slices of threads that compile grammars.
Work that holds the GIL must not run here: a low-priority thread with the GIL delays all others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

# The increment for `nice`.  A thread of this niceness gets a tenth of the time of a normal one.
NICENESS: Final = 10


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere `nice` applies to the whole process
        os.nice(NICENESS)


# The default is at least five threads, and at most four calls of `in_background` run at a time.
_THREADS: Final = ThreadPoolExecutor(None, "background", _lower_priority)


def in_background(work: Callable[[], T]) -> T:
    """Call `work` on a low-priority thread and wait; return its result or raise its error."""
    return _THREADS.submit(work).result()
