"""CUDA's driver on a CPU (`libcuda.cpp`), in place of the real one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from kernels.cuda import device_memory
from tests.kernels.shim.backend import HERE, library, why_not


def install() -> ctypes.CDLL:
    """Have `kernels.cuda.device_memory` call the one of the CPU in this process."""
    path = library("libcuda", (HERE / "libcuda.cpp").read_text())
    device_memory.LIBRARY = str(path)
    device_memory._library.cache_clear()  # noqa: SLF001
    return ctypes.CDLL(str(path))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The driver, which has `shim_refuse` and `shim_live`."""
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setattr(device_memory, "LIBRARY", device_memory.LIBRARY)
    yield (it := install())
    it.shim_refuse(b"")
    device_memory._library.cache_clear()  # noqa: SLF001
