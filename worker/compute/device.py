"""Selects the device that runs a model, and names its arithmetic."""

from __future__ import annotations

import structlog
import torch

from kernels import KernelError
from kernels.cpu.intrinsics import target_name
from worker.model.config import ModelError

log = structlog.get_logger("worker")


def find_device(name: str) -> torch.device:
    """Return the device that the setting `--device` selects.

    Args:
        name: "cpu", "cuda", "cuda:N" or "auto".  "auto" selects a usable GPU, else the CPU, and
            logs why a GPU that exists cannot be used.

    Raises:
        ModelError: The name is invalid, or the device cannot be used; the message says why.
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
    """Return a name for how this device rounds: equal names imply bitwise equal results."""
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
    """Return why the kernels cannot run on GPU `index`; None if they can."""
    from kernels.cuda.backend import require_device

    try:
        require_device(index)
    except KernelError as error:
        return str(error)
    return None
