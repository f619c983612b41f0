"""Finds objects in reference cycles, which only the garbage collector frees."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

# Whose objects are looked for; the libraries of a test leave circles of their own.
OURS = frozenset({"router", "wire", "uvicorn"})


@contextmanager
def circles() -> Iterator[Counter[str]]:
    """Count by its type, once the block is over, what it left in circles."""
    found = Counter[str]()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        kinds = [type(each) for each in gc.garbage]
        found.update(kind.__name__ for kind in kinds if kind.__module__.split(".")[0] in OURS)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
