"""Runs stages in processes of their own: a kernel that breaks its process breaks nothing else.

When a process dies or is out of time, the part that it was at is lost and another process goes on
with the next one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tests.gpu.trail import Finding, State, Trail


class Child(Protocol):
    """Starts a process for the parts of a stage from a number on, `limit_s` at most."""

    def __call__(self, first: int, limit_s: float) -> str:
        """Return how it ended, in words."""


def run_stage(
    stage: str,
    names: Sequence[str],
    child: Child,
    trail: Trail,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Have every part of a stage run, or find out why not; afterwards each has a finding."""
    deadline = clock() + limit_s
    first = 0
    while first < len(names):
        left_s = deadline - clock()
        if left_s < 1:
            skip(stage, names[first:], "there was no time left", trail)
            return
        ended = child(first, left_s)
        lost = trail.open_part(stage)
        if lost is not None:
            trail.add(Finding(stage, lost.part, State.LOST, ended))
        tried = {finding.part for finding in trail.findings() if finding.stage == stage}
        following = next((n for n, name in enumerate(names) if name not in tried), len(names))
        if following == first:  # it died before its first part: so would the next
            trail.add(Finding(stage, names[first], State.LOST, ended))
            skip(stage, names[first + 1 :], "its process could not be started", trail)
            return
        first = following


def skip(stage: str, names: Sequence[str], why: str, trail: Trail) -> None:
    for name in names:
        trail.add(Finding(stage, name, State.SKIPPED, why))


def run_process(command: Sequence[str], log: Path, limit_s: float, cwd: Path) -> str:
    """Run a command with its children for so long at most; say how it ended."""
    with log.open("ab") as output:
        before = output.tell()  # others write to it too
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
            ended = f"its process ended with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"not done in {limit_s:.0f} s"
        finally:
            _kill_group(process)
    last = log.read_bytes()[before:].decode(errors="replace").strip().splitlines()[-1:]
    return f"{ended}: {last[0][:300]}" if last else ended


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
