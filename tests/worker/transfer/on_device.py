"""A worker on a device that is a CPU: its KV lies in memory that is mapped by a descriptor.

The driver and the kernels are those of `tests.kernels.shim`; the model is computed as on a CPU.
`create` is an executor of `python -m worker`, for workers that are processes of their own.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from typing import Any, Final

import torch

from kernels.cuda import staging
from kernels.cuda.device_memory import DeviceMemory
from tests.kernels.shim import driver
from tests.kernels.shim.lane import CpuLane
from worker.compute.kv_cache import TorchKVCache
from worker.executor import gpu
from worker.executor import torch as executor
from worker.executor.torch import TorchExecutor

# Where a worker says that it copies KV, and goes no further.
STUCK: Final = "BATON_TEST_STUCK"
COPYING: Final = "it copies"
make_cache = partial(TorchKVCache, make_lane=lambda _: CpuLane(dtype=torch.float32))


def create(**settings: Any) -> TorchExecutor:
    """Make the executor in a process that makes no other."""
    driver.install()
    staging.SIZES = (512, 2048)  # type: ignore[assignment]
    executor.TorchKVCache = make_cache  # type: ignore[assignment, attr-defined]
    if STUCK in os.environ:
        DeviceMemory.copy = _stuck  # type: ignore[assignment, method-assign]
    return gpu.create(**settings | {"dtype": "float32", "device": "cpu"})


def _stuck(*_: object) -> int:
    sys.stdout.write(f"{COPYING}\n")
    sys.stdout.flush()
    threading.Event().wait()
    raise AssertionError("nobody ends this")
