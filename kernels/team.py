"""Compiled loops on torch's own threads.

A task is a native function of one address, that of an int64 array: word 0 is the address of a
counter (word 1, from 0) from which the threads take their shares until it reaches the end; the
words from 2 are the task's own.  Shares are taken, not dealt: a thread that another process holds
up delays no more than the piece in its hands.

The threads are those of the OpenMP library torch has loaded: a second pool would spin against the
first on the same cores.  Where that library is not GNU's, Python threads run the task.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numba
import torch
from numba import cfunc, njit, types

TASK = types.void(types.CPointer(types.int64))
# A product and a sum may be rounded once, sums reordered.
FASTMATH = {"contract", "reassoc", "nsz"}
# A part of a task, compiled into it.
inner = njit(fastmath=FASTMATH)
_COMPILING = Lock()
_Launch = Callable[[Any, int, int], None]


def compiled(function: Callable[..., None]) -> Any:
    """Compile a task: a module's function over its globals, or the cache on disk never hits."""
    with _COMPILING:
        usual = numba.config.CACHE_DIR
        try:
            numba.config.CACHE_DIR = str(_cache_directory())
            return cfunc(TASK, nopython=True, cache=True, fastmath=FASTMATH)(function)
        except (OSError, RuntimeError):  # nowhere to keep it
            return cfunc(TASK, nopython=True, fastmath=FASTMATH)(function)
        finally:
            numba.config.CACHE_DIR = usual


@cache
def _cache_directory() -> Path:
    # Numba looks at one file's date; a task is made of several.
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "baton" / "kernels" / digest[:16]


def run(task: Any, words: list[int], num_threads: int = 0) -> None:
    """Run a task on its own `words`; `num_threads` 0 is as many as torch uses.

    Returns when every thread is done.  The interpreter lock is released meanwhile.
    """
    arguments = array("q", [0, 0, *words])
    address = arguments.buffer_info()[0]
    arguments[0] = address + 8
    num_threads = num_threads or torch.get_num_threads()
    if num_threads == 1:
        task.ctypes(ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)))
    else:
        _launcher()(task, address, num_threads)


@cache
def _launcher() -> _Launch:
    return _openmp_launcher() or _threads_launcher()


def _openmp_launcher() -> _Launch | None:
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if sys.platform != "linux" or not libraries:
        return None
    parallel = ctypes.CDLL(str(libraries[0])).GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None

    def launch(task: Any, address: int, num_threads: int) -> None:
        parallel(task.address, address, num_threads, 0)

    return launch


def _threads_launcher() -> _Launch:
    pool = ThreadPoolExecutor(thread_name_prefix="kernels")
    pointer = ctypes.POINTER(ctypes.c_int64)

    def launch(task: Any, address: int, num_threads: int) -> None:
        argument = ctypes.cast(address, pointer)
        others = [pool.submit(task.ctypes, argument) for _ in range(num_threads - 1)]
        task.ctypes(argument)
        wait(others)

    return launch
