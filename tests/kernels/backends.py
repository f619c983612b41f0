"""The CUDA kernels by name: on the CPU through the shim, or on a GPU; else the test is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from kernels import KernelError
from kernels.contract import Backend
from kernels.cuda import backend as cuda
from tests.kernels.shim.backend import Shim, why_not

BACKENDS: Final = ["shim", pytest.param("cuda", marks=pytest.mark.gpu)]


def require_gpu() -> None:
    """Skip the test where there is no GPU."""
    try:
        cuda.require_device()
    except KernelError as error:
        pytest.skip(str(error))


def backend_named(name: str, shim: Callable[[], Shim]) -> Backend:
    """Return a backend of `BACKENDS`."""
    if name == "shim":
        if reason := why_not():
            pytest.skip(reason)
        return shim()
    require_gpu()
    return cuda
