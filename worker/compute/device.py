"""Which device a model runs on, the best or the one a setting names, and how that one computes."""

from __future__ import annotations

import structlog
import torch

from kernels import KernelError
from kernels.cpu.intrinsics import target_name
from worker.model.config import ModelError

log = structlog.get_logger("worker")


def find_device(name: str) -> torch.device:
    """Return the device a setting names.

    Args:
        name: "cpu", "cuda" or "cuda:N"; "auto" is a GPU that everything needed is there for, else
            the CPU, and what a GPU lacks is logged.

    Raises:
        ModelError: It names none, or one that cannot be used; says what is missing.
    """
    if name == "auto":
        return _best()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device is {name!r}, not auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device is {name!r}, not auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (missing := _missing(device.index or 0)):
        raise ModelError(f"device is {name!r}: {missing}")
    return device


def arithmetic_of(device: torch.device, dtype: torch.dtype) -> str:
    """Return a name for what the bits of numbers depend on: where it is equal, they are equal."""
    is_cuda = device.type == "cuda"
    processor = torch.cuda.get_device_name(device) if is_cuda else target_name()
    return f"{device.type} {processor} {str(dtype).removeprefix('torch.')}"


def _best() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if missing := _missing(0):
        log.warning("there is a GPU, but the CPU is used", reason=missing)
        return torch.device("cpu")
    return torch.device("cuda")


def _missing(index: int) -> str | None:
    """Say why the kernels cannot run on a GPU, None if they can."""
    from kernels.cuda.backend import require_device

    try:
        require_device(index)
    except KernelError as error:
        return str(error)
    return None
