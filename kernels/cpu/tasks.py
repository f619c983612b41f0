"""How a Python loop becomes native code, and how its arguments lie in memory, each under its name.

A task is a function of a module, over the module's globals: `def _norm(a: NormArguments, thread:
int) -> None`.  The class of its arguments is declared once: Python fills one in, `record_of` lays
it out as a NumPy record, and the compiled loop reads `a.eps` from there.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NewType, ParamSpec, TypeVar, get_type_hints

import numba
import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys

from kernels.cpu import intrinsics

P = ParamSpec("P")
R = TypeVar("R")
# (arguments, number of the thread it runs on: 0 for the caller)
Task = Callable[[Any, int], None]
Record = npt.NDArray[np.void]
# An int64 that many threads write, on a cache line of its own.
Shared = NewType("Shared", int)

_LOG = logging.getLogger("kernels")
CACHE_LINE = 64
# A product and a sum may be rounded once, sums reordered.
FASTMATH = {"contract", "reassoc", "nsz"}
# Division as NumPy has it: a check for zero in a loop keeps it from being vectorized.
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}
_FIELD_TYPES: dict[Any, Any] = {
    int: np.int64,
    bool: np.int64,
    Shared: np.int64,
    float: np.float32,
    np.float64: np.float64,
}


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """Let tasks call a function; it is compiled into them.

    Always: a function that is left standing is compiled once by itself and once more within each
    task, maybe to sums in another order.  Which of them runs would depend on what was compiled in
    this process and what came from the cache on disk, and two workers would differ in a last bit.
    """
    compilable: Callable[P, R] = njit(forceinline=True, **_OPTIONS)(function)
    return compilable


_aligned_alloc = types.ExternalFunction("aligned_alloc", types.int64(types.int64, types.int64))
_free = types.ExternalFunction("free", types.void(types.int64))


@inner
def allocate(num_bytes: int) -> int:
    """Return where a task has so many bytes for itself, on a cache line, until `give_back`.

    Not an array: Numba gives an array back where its name is used last, and a task goes on with the
    address.
    """
    address: int = _aligned_alloc(CACHE_LINE, (num_bytes // CACHE_LINE + 1) * CACHE_LINE)
    return address


@inner
def give_back(address: int) -> None:
    """Give back what `allocate` returned."""
    _free(address)


def comparing(function: Callable[P, R]) -> Callable[P, R]:
    """`inner` for comparisons of numbers: a maximum is vectorized only if NaN may be forgotten."""
    options = {**_OPTIONS, "fastmath": FASTMATH | {"nnan"}}
    compilable: Callable[P, R] = njit(forceinline=True, **options)(function)
    return compilable


@cache
def layout_of(kind: type) -> np.dtype[np.void]:
    """Return how the annotated fields of a class lie in memory, 8 bytes each, in their order."""
    names, formats, offsets, end = [], [], [], 0
    for name, hint in get_type_hints(kind).items():
        if hint is Shared:
            end = -(-end // CACHE_LINE) * CACHE_LINE
        names.append(name)
        formats.append(_FIELD_TYPES[hint])
        offsets.append(end)
        end += CACHE_LINE if hint is Shared else 8
    described: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": end}
    layout: np.dtype[np.void] = np.dtype(described, align=True)
    return layout


def record_of(arguments: tuple[Any, ...]) -> Record:
    """Return arguments, an instance of a NamedTuple, as a record of one: [1]."""
    return np.array([arguments], layout_of(type(arguments)))


def records_at(kind: type) -> Callable[[int], Any]:
    """Return the function that gives compiled loops the record of such a class at an address."""
    return intrinsics.record_at(numba.from_dtype(layout_of(kind)))


@cache
def compiled(task: Task) -> Any:
    """Compile a task: `address` is that of a native function of (address of arguments, thread)."""
    kind = next(iter(get_type_hints(task).values()))
    signature = (numba.from_dtype(layout_of(kind)), types.int64), types.void
    options = {"nopython": True, **_OPTIONS}
    try:
        native: CFunc = _CachedFunction(task, signature, locals={}, options=options)
        native.compile()
    except (OSError, RuntimeError) as error:  # nowhere to keep it
        native = CFunc(task, signature, locals={}, options=options)
        native.compile()
        say_not_kept(getattr(error, "strerror", None) or str(error))
    return native


@cache
def say_not_kept(reason: str) -> None:
    """Say once in a process why every start of it takes so long."""
    _LOG.warning(
        "compiled loops cannot be kept in %s (%s), so each start compiles them anew; make room "
        "there, or set XDG_CACHE_HOME to a directory that this process can write to",
        _cache_directory(),
        reason,
    )


class CacheLocator(UserProvidedCacheLocator):  # type: ignore[misc]
    """Where compiled tasks are kept: Numba's own setting is one for everything in the process."""

    def __init__(self, task: Any, path: str) -> None:
        super().__init__(task, path)
        directory = _cache_directory().expanduser()  # raises RuntimeError
        self._cache_path = str(directory / self.get_suitable_cache_subpath(path))

    @classmethod
    def from_function(cls, task: Any, path: str) -> CacheLocator:
        locator = cls(task, path)
        locator.ensure_cache_path()
        return locator

    def get_source_stamp(self) -> Any:
        """Return what changes with the code: Numba looks at one file, a task is made of several."""
        sources = sorted(Path(__file__).parent.glob("*.py"))
        digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
        return super().get_source_stamp(), digest.digest()


class _Storage(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (CacheLocator,)


class _Cache(FunctionCache):  # type: ignore[misc]
    """What is kept of a task; where nothing is, one process compiles it and the others wait.

    Processes that start together want the same tasks.  The lock is let go when `held` closes, or
    when the process ends, however it does.
    """

    _impl_class = _Storage

    def __init__(self, task: Any, held: ExitStack) -> None:
        super().__init__(task)
        self._lock = Path(self.cache_path) / f"{self._impl.filename_base}.lock"
        self._held = held

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return what is kept: without what Numba imports to compile, 0.15 s in each process."""
        rtsys.initialize(context)  # what some loops are linked to
        kept = self._load_overload(signature, context)
        if kept is None:
            fcntl.flock(self._held.enter_context(self._lock.open("w")), fcntl.LOCK_EX)
            kept = super().load_overload(signature, context)
        return kept


class _CachedFunction(CFunc):
    def compile(self) -> None:
        with ExitStack() as held:
            self._cache = _Cache(self.__wrapped__, held)
            super().compile()


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "baton", "kernels")
