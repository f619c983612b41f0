"""One process's share of a stage: its parts one after another, each written down as it ends."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from itertools import islice

import torch

from tests.gpu.settings import Part, Unavailable
from tests.gpu.trail import Finding, State, Trail

# A kernel has broken the device's context, and with it everything that would follow here.
EXIT_POISONED = 70


def run_parts(stage: str, parts: Mapping[str, Part], trail: Trail, first: int = 0) -> int:
    """Run the parts from number `first` on; return the exit status, 0 if all ended well."""
    status = 0
    for name, part in islice(parts.items(), first, None):
        trail.add(Finding(stage, name, State.BEGUN))
        start_s = time.monotonic()
        try:
            figures = part()
        except Unavailable as reason:
            trail.add(Finding(stage, name, State.SKIPPED, str(reason)))
        except Exception as problem:
            traceback.print_exc()
            said = f"{type(problem).__name__}: {problem}"
            trail.add(Finding(stage, name, State.FAILED, said[:1200]))
            status = 1
            if _is_poisoned():
                return EXIT_POISONED
        else:
            seconds = round(time.monotonic() - start_s, 2)
            trail.add(Finding(stage, name, State.OK, figures=figures, seconds=seconds))
    return status


def _is_poisoned() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
