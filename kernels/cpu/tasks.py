"""Compile Python loops to native code, and lay out their named arguments in memory.

A task is a module-level function, which may use the module's globals: `def _norm(a: NormArguments,
thread: int) -> None`.  Its argument class describes both the Python object and the NumPy record,
made by `record_of`, from which the compiled loop reads `a.eps`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NewType, ParamSpec, TypeVar, get_type_hints

import llvmlite
import numba
import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys

from kernels.cache import Directory, compiled_code, digest_of, opened
from kernels.cpu import intrinsics

P = ParamSpec("P")
R = TypeVar("R")
# The parameters are the arguments and the number of the thread: 0 for the caller.
Task = Callable[[Any, int], None]
Record = npt.NDArray[np.void]
# An int64 that many threads write, on its own cache line.
Shared = NewType("Shared", int)

_LOG = logging.getLogger("kernels")
_SOURCES = Path(__file__).parent
CACHE_LINE = 64
# A product and a sum may be fused, and sums may be reordered.
FASTMATH = {"contract", "reassoc", "nsz"}
# Division as in NumPy: a check for zero in a loop keeps the loop from being vectorized.
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}
_FIELD_TYPES: dict[Any, Any] = {
    int: np.int64,
    bool: np.int64,
    Shared: np.int64,
    float: np.float32,
    np.float64: np.float64,
}


def _inlined(function: Callable[P, R], fastmath: Any) -> Callable[P, R]:
    options = {**_OPTIONS, "fastmath": fastmath}  # without it the caller's flags apply
    compilable: Callable[P, R] = njit(forceinline=True, **options)(function)
    return compilable


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function into the tasks that call it; it is always inlined.

    A function that is not inlined is compiled once by itself and once more within each task, maybe
    with another order of sums.  Which of them runs would depend on what was compiled in this
    process and what came from the cache on disk, and two workers would differ in a last bit.
    """
    return _inlined(function, FASTMATH)


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """Act as `inner` for results that must be bit-identical elsewhere: round each operation."""
    return _inlined(function, False)


def comparing(function: Callable[P, R]) -> Callable[P, R]:
    """Act as `inner` for comparisons: a maximum is vectorized only if NaN may be ignored."""
    return _inlined(function, FASTMATH | {"nnan"})


_aligned_alloc = types.ExternalFunction("aligned_alloc", types.int64(types.int64, types.int64))
_free = types.ExternalFunction("free", types.void(types.int64))


@inner
def allocate(num_bytes: int) -> int:
    """Allocate `num_bytes` on a cache line for a task, until `free`.

    It is not an array: Numba frees an array after the last use of its name, but the task still uses
    its address.
    """
    address: int = _aligned_alloc(CACHE_LINE, (num_bytes // CACHE_LINE + 1) * CACHE_LINE)
    return address


@inner
def free(address: int) -> None:
    """Free memory from `allocate`."""
    _free(address)


@cache
def layout_of(kind: type) -> np.dtype[np.void]:
    """Return the memory layout of a class's annotated fields, 8 bytes each, in their order."""
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
    """Convert a NamedTuple of arguments to a structured array of length 1."""
    return np.array([arguments], layout_of(type(arguments)))


def records_at(kind: type) -> Callable[[int], Any]:
    """Return a function for compiled loops that takes an address and returns the record there.

    The record has the fields of `kind`.  It is not copied: assignments change the memory.
    """
    return intrinsics.record_at(numba.from_dtype(layout_of(kind)))


@cache
def compiled(task: Task) -> Any:
    """Compile a task; its `address` is a native function of (address of arguments, thread)."""
    kind = next(iter(get_type_hints(task).values()))
    signature = (numba.from_dtype(layout_of(kind)), types.int64), types.void
    native = _CachedFunction(task, signature, locals={}, options={"nopython": True, **_OPTIONS})
    native.compile()
    return native


@cache
def warn_not_cached(reason: str) -> None:
    """Warn once per process that compiled loops cannot be cached."""
    _LOG.warning(
        "compiled loops cannot be kept in %s (%s), so each start compiles them anew; make room "
        "there, or set XDG_CACHE_HOME to a directory of this user that no other can write to",
        compiled_code(),
        reason,
    )


class _CachedFunction(CFunc):
    def compile(self) -> None:
        with ExitStack() as held:
            self._cache = _Cache(self.__wrapped__, held)
            super().compile()


class _Cache:
    """The cached code of a task, as `CFunc` expects it; Numba's own cache would unpickle files.

    Processes that start together need the same tasks: if a task is not cached, one process compiles
    it and the others wait.  The lock is released when `held` closes, or when the process ends.
    """

    def __init__(self, task: Task, held: ExitStack) -> None:
        self._task = task
        self._held = held
        self._directory: Directory | None = None
        self._name, self._key = "", b""

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the cached code, without importing Numba's compiler (0.15 s in each process)."""
        rtsys.initialize(context)  # some loops are linked to it
        processor = context.codegen().magic_tuple()
        self._name = f"{self._task.__module__}.{self._task.__qualname__}-{_short(processor)}"
        self._key = _key(self._task, str(signature), processor)
        try:
            path = compiled_code().expanduser() / f"cpu-{_short(_SOURCES)}"
            directory = self._held.enter_context(opened(path))
            code = directory.load(self._name, self._key)
            if code is None:
                self._held.enter_context(directory.locked(self._name))
                code = directory.load(self._name, self._key)
        except (OSError, RuntimeError) as error:  # there is no place for a cache
            warn_not_cached(getattr(error, "strerror", None) or str(error))
            return None
        self._directory = directory
        return None if code is None else _load_code(code, context)

    def save_overload(self, _: Any, result: Any) -> None:
        """Save compiled code in the cache."""
        if self._directory is not None:
            try:
                self._directory.save(self._name, self._key, _code_of(result))
            except OSError as error:
                warn_not_cached(error.strerror or str(error))


def _code_of(result: Any) -> bytes:
    """Serialize compiled code for `_load_code`: a line of JSON, then two modules."""
    # The code must not depend on this process: no addresses, no Python objects.
    assert not result.library.has_dynamic_globals
    assert not any(it.consts for it in result._find_referenced_environments())  # noqa: SLF001
    name, kind, (native, bitcode) = result.library.serialize_using_object_code()
    head = name, kind, len(native), result.fndesc.llvm_cfunc_wrapper_name
    return b"".join([json.dumps(head).encode(), b"\n", native, bitcode])


def _load_code(code: bytes, context: Any) -> Any:
    """Load compiled code into memory; return what Numba's `CFunc` needs of it."""
    line, _, modules = code.partition(b"\n")
    name, kind, size, wrapper = json.loads(line)
    state = name, kind, (modules[:size], modules[size:])
    library = context.codegen().unserialize_library(state)
    return SimpleNamespace(library=library, fndesc=SimpleNamespace(llvm_cfunc_wrapper_name=wrapper))


def _key(task: Task, signature: str, processor: tuple[str, ...]) -> bytes:
    """Return a digest of everything on which the code of a task depends."""
    releases = sys.version, numba.__version__, llvmlite.__version__
    said = repr((task.__qualname__, signature, processor, releases))
    return digest_of(said.encode() + _sources(task.__code__.co_filename))


@cache
def _sources(path: str) -> bytes:
    """Return a digest of a task's file and of the files whose functions may be inlined into it."""
    return digest_of(
        b"".join(it.read_bytes() for it in (Path(path), *sorted(_SOURCES.glob("*.py"))))
    )


def _short(value: object) -> str:
    return digest_of(str(value).encode()).hex()[:8]
