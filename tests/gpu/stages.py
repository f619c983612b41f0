"""The stages of a check, the most telling first: a run that is cut has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Final, NamedTuple

import torch

from tests.gpu.settings import Part, Settings
from tests.gpu.trail import Figures


class Stage(NamedTuple):
    """Parts that share a process, as long as it lives.

    Attributes:
        parts: a function of a module of this folder; it is imported when the stage is run.
        limit_s: its share of the time, and what the stages before left over; then it is skipped.
    """

    name: str
    parts: str
    limit_s: float

    def parts_of(self, settings: Settings) -> dict[str, Part]:
        """Return the stage's parts by name."""
        module, _, function = self.parts.partition(":")
        make: Callable[[Settings], dict[str, Part]]
        make = getattr(import_module(f"tests.gpu.{module}"), function)
        return make(settings)


# All limits together are less than nine minutes.
STAGES: Final = (
    Stage("machine", "stages:machine_parts", 20),
    Stage("verify kv", "verify:kv_parts", 40),
    Stage("verify rows", "verify:row_parts", 20),
    Stage("verify draw", "verify:draw_parts", 10),
    Stage("verify attention", "verify:attention_parts", 38),
    Stage("verify staging", "verify:staging_parts", 20),
    Stage("verify lent", "lent:piece_parts", 20),
    Stage("verify graphs", "graphs:graph_parts", 30),
    Stage("logits", "logits:logit_parts", 20),
    Stage("bench limits", "bench:limit_parts", 15),
    Stage("bench kernels", "bench:kernel_parts", 20),
    Stage("bench peers", "peers:peer_parts", 20),
    Stage("bench staging", "bench:staging_parts", 20),
    Stage("bench launch", "bench:launch_parts", 20),
    Stage("bench engine", "engine:engine_parts", 70),
    Stage("system", "system:system_parts", 40),
    Stage("system serve", "serve:serve_parts", 90),
    Stage("sanitizer", "sanitizer:sanitizer_parts", 25),
)


def stage_named(name: str) -> Stage:
    """Return a stage; KeyError if there is none of the name."""
    return {stage.name: stage for stage in STAGES}[name]


def machine_parts(settings: Settings) -> dict[str, Part]:
    """Name the device and what the kernels are compiled and started with."""
    return {"versions": partial(_versions, settings)}


def _versions(settings: Settings) -> Figures:
    if settings.backend != "cuda":
        return {"device": "a CPU", "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(settings.device)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(total_bytes / 2**30, 1),
        "free_gib": round(free_bytes / 2**30, 1),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
