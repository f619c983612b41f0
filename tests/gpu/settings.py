"""Settings of one process of a check."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from kernels import reference
from kernels.contract import Backend
from kernels.cuda import backend as cuda
from kernels.cuda.copy_streams import Lane, SideStream
from kernels.cuda.launch import Launch
from kernels.cuda.prompt_attention import Way
from tests.gpu.trail import Figures
from tests.kernels.instances import attention_kernels, wide_kernels

Part = Callable[[], Figures]
T = TypeVar("T")


class Unavailable(Exception):
    """A part cannot be tried here; nothing is known to be wrong."""


class Settings(NamedTuple):
    """Where kernels run, on which inputs, and how many of them.

    Attributes:
        backend: "cuda", or "shim": the same kernels compiled for the CPU, to try this script; or
            "reference" in their place, to try what is tolerated.
        is_quick: few and small inputs.
    """

    backend: str
    seed: int
    is_quick: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.backend == "cuda" else torch.device("cpu")

    @property
    def is_small(self) -> bool:
        """Whether inputs must be small: on a CPU, under a sanitizer, or because it was asked."""
        return self.is_quick or self.backend == "shim"

    def size(self, full: T, small: T) -> T:
        """Return a size of the inputs."""
        return small if self.is_small else full

    def random(self, part: str) -> random.Random:
        """Return the randomness of one part: alone or among others, it is checked on the same."""
        return random.Random(f"{self.seed} {part}")


def kernels_of(settings: Settings, needed: dict[str, list[str]]) -> Backend:
    """Return the kernels; `needed` are instantiations by source, which the shim must be told."""
    if settings.backend == "cuda":
        return cuda
    if settings.backend == "reference":
        return reference
    from tests.kernels.shim.backend import GPU, HOPPER, Shim

    return Shim(needed, gpu=HOPPER if "attention_hopper" in needed else GPU)


def wide_of(settings: Settings, dtype: torch.dtype, head_dim: int) -> Callable[..., torch.Tensor]:
    """Return `paged_attention` with many rows by `attend_wide`.

    Raises:
        Unavailable: The GPU is no Hopper.
    """
    if settings.backend == "cuda":
        if torch.cuda.get_device_capability(settings.device) != cuda.HOPPER:
            raise Unavailable("attend_wide runs on Hopper (compute capability 9.0) alone")
        return partial(cuda.attend, Way.WIDE)
    names = {
        "attention": attention_kernels(dtype, head_dim),
        "attention_hopper": wide_kernels(dtype, head_dim),
    }
    return kernels_of(settings, names).paged_attention


def start(settings: Settings, kernels: Any, launches: list[Launch]) -> None:
    """Start launches as the operators of `kernels` do."""
    if settings.backend == "cuda":
        cuda.start(settings.device, launches)
    else:
        kernels.run(launches)


def launching(settings: Settings) -> AbstractContextManager[object]:
    """Have the operators of the CUDA backend start kernels, or nothing where there is no GPU."""
    if settings.backend == "cuda":
        return nullcontext()
    from tests.kernels.shim.cupy import Cupy, standing_in

    return standing_in(Cupy(is_idle=True))


def lane_of(settings: Settings, dtype: torch.dtype) -> Lane:
    """Return where staging's copies run."""
    if settings.backend == "cuda":
        return SideStream(settings.device)
    from tests.kernels.shim.lane import CpuLane

    return CpuLane(dtype=dtype)


def compute(lane: Any, call: Callable[[], object]) -> None:
    """Ask for something where steps are computed, and do not wait for it."""
    call() if isinstance(lane, SideStream) else lane.compute(call)


def is_computing(lane: Any) -> bool:
    """Whether something that was asked for there has not been computed."""
    if isinstance(lane, SideStream):
        return not torch.cuda.default_stream().query()
    return bool(lane.computing)


def finish(lane: Any) -> None:
    """Wait until all of it is computed."""
    if isinstance(lane, SideStream):
        torch.cuda.synchronize()
    else:
        lane.computing.clear()
