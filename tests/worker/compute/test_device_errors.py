"""CUDA's errors, as torch and CuPy raise them, are told from others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from worker.compute.device_errors import device_error, report_copy

ADVICE = "\nSearch for `cudaErrorAssert' in the documentation.\nCompile with `TORCH_USE_CUDA_DSA`."


class CUDARuntimeError(RuntimeError):
    """CuPy's own cannot be imported without a driver."""


class OutOfMemoryError(MemoryError):
    """CuPy's, likewise."""


ASSERT = "CUDA error: device-side assert triggered"
BLAS = "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa )`"
ADDRESS = "cudaErrorIllegalAddress: an illegal memory access was encountered"
FULL_RUNTIME = "cudaErrorMemoryAllocation: out of memory"
FULL_POOL = "Out of memory allocating 2,048 bytes (allocated so far: 0 bytes)."
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.19 GiB."


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.AcceleratorError(ASSERT + ADVICE), ASSERT),
        (RuntimeError(ASSERT + ADVICE), ASSERT),
        (RuntimeError(BLAS), BLAS),
        (CUDARuntimeError(ADDRESS), ADDRESS),
        (torch.OutOfMemoryError(FULL), FULL),
        (CUDARuntimeError(FULL_RUNTIME), FULL_RUNTIME),
        (OutOfMemoryError(FULL_POOL), FULL_POOL),
        (RuntimeError("shape '[4]' is invalid for input of size 3"), None),
        (MemoryError(), None),
    ],
)
def test_the_sentence_is_cuda_s_own(error: Exception, sentence: str | None) -> None:
    assert device_error(error) == sentence


def test_only_a_broken_device_ends_the_worker_whose_copy_failed() -> None:
    posted: list[Callable[[Any], object]] = []
    full = [
        torch.OutOfMemoryError(FULL),
        CUDARuntimeError(FULL_RUNTIME),
        OutOfMemoryError(FULL_POOL),
    ]
    for harmless in (*full, ValueError("no device at all")):
        report_copy(harmless, posted.append)
    assert posted == []
    report_copy(RuntimeError(ASSERT), posted.append)
    with pytest.raises(RuntimeError, match="device-side assert") as raised:
        posted[0](None)
    assert raised.value.__notes__ == ["in a copy of KV"]
