"""Runs work that mostly holds no GIL at a low priority, behind event loop and engine.

Otherwise each step of the engine waits for a time slice of every thread that compiles a structure.
Only work that releases the GIL belongs here: a low-priority thread with the GIL delays the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

# For `nice`: beside a thread of the usual priority, one of these gets a tenth of the time.
STEPS_BACK: Final = 10


def _step_back() -> None:
    if sys.platform == "linux":  # elsewhere `nice` is for the whole process
        os.nice(STEPS_BACK)


# By default five threads or more; at most four threads of a process call `in_background` at a time.
_THREADS: Final = ThreadPoolExecutor(None, "background", _step_back)


def in_background(work: Callable[[], T]) -> T:
    """Call `work` on a thread of low priority and wait; return its result or raise its error."""
    return _THREADS.submit(work).result()
