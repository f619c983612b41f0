"""The verification once more, small, under compute-sanitizer: bad addresses, races, barriers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial

from tests.gpu.settings import Part, Settings, Unavailable
from tests.gpu.trail import Figures

TOOLS = ("memcheck", "racecheck", "synccheck")
STAGES = ("verify attention", "verify kv")


def sanitizer_parts(settings: Settings) -> dict[str, Part]:
    """Each tool on each stage; however slow, they end with the time of this stage."""
    return {
        f"{tool}: {stage}": partial(_run, settings, tool, stage)
        for tool in TOOLS
        for stage in STAGES
    }


def find() -> str | None:
    """Return the path of compute-sanitizer, None if it is not installed."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


def problem_of(returncode: int, output: str) -> str:
    """Return what the tool complains about, empty if it is content."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
    if summary is None:
        return f"exit status {returncode} and no summary: {output[-300:]}"
    num_errors = int(summary[1] or summary[2])
    if num_errors == 0 and returncode == 0:
        return ""
    first = re.search(r"=+ ((?:Invalid|Error|Barrier|Race|Warning)[^\n]*)", output)
    return f"{num_errors} errors, exit status {returncode}: {first[1] if first else output[-300:]}"


def _run(settings: Settings, tool: str, stage: str) -> Figures:
    path = find() if settings.backend == "cuda" else None
    if path is None:
        raise Unavailable("compute-sanitizer is not installed, or there is no GPU")
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [
                *(path, "--tool", tool, "--error-exitcode", "77", "--target-processes", "all"),
                *(
                    sys.executable,
                    "-m",
                    "tests.gpu",
                    "--stage",
                    stage,
                    "--out",
                    directory,
                    "--quick",
                ),
                *("--seed", str(settings.seed)),
            ],
            # Torch's allocator keeps what is freed: addresses past a tensor would be valid.
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if problem := problem_of(done.returncode, done.stdout + done.stderr):
        raise RuntimeError(problem)
    return {"errors": 0}
