"""Cores of a machine: lists of them as Linux writes them (`0-3,8`), and which a process may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from re import fullmatch
from typing import Final

# No machine has more; a longer list is a mistake, not to be counted out.
MAX_CORES: Final = 1 << 16


def parse_cores(text: str) -> frozenset[int]:
    """Return the numbers of a list such as ``0-3,8``; none of an empty one.

    Raises:
        ValueError: It is no such list.
    """
    found: set[int] = set()
    for run in filter(None, text.strip().split(",")):
        match = fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", run.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MAX_CORES:
            raise ValueError(
                f"{run.strip()!r} is neither a core nor a run of them; write numbers from 0 and "
                "runs of them, with commas between: 0-3,8"
            )
        found.update(range(first, last + 1))
    return frozenset(found)


def format_cores(cores: Collection[int]) -> str:
    """Return the shortest list of these numbers; `parse_cores` reads it."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def own_cores() -> frozenset[int]:
    """Return the cores that the calling thread may run on; none where the system does not say."""
    if sys.platform != "linux":
        return frozenset()
    return frozenset(os.sched_getaffinity(0))


def run_on(cores: Collection[int]) -> None:
    """Let this process run on these cores only: every thread it has, and those it will start.

    Raises:
        ValueError: It may not, or cannot here; the message has the cores that it may run on.
    """
    if sys.platform != "linux":
        raise ValueError("this system does not let a process choose its cores; leave --cores out")
    may = own_cores()
    if not cores or not may.issuperset(cores):
        raise ValueError(
            f"--cores {format_cores(cores)}: this process may run on {format_cores(may)}; "
            "name only some of these, or leave --cores out"
        )
    # A library that was imported has begun its threads already.
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # it has ended since
