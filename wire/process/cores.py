"""CPU cores: lists as Linux writes them (`0-3,8`), topology, and those a process may use.

A core here is what Linux counts as a CPU: with SMT, one of the threads of a physical core.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import suppress
from math import ceil, inf
from pathlib import Path
from re import fullmatch
from typing import Final

SYSTEM: Final = Path("/sys/devices/system")
GROUPS: Final = Path("/sys/fs/cgroup")
# No machine has more; a longer list is a mistake, not to be counted out.
MAX_CORES: Final = 1 << 16


def parse_cores(text: str) -> frozenset[int]:
    """Return the numbers of a list such as ``0-3,8``; none of an empty one.  Raises ValueError."""
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


def physical_cores(cores: Collection[int], system: Path = SYSTEM) -> list[frozenset[int]]:
    """Group cores by physical core (SMT siblings); one group each where Linux does not say."""
    found = {
        core: parse_cores(_read(system / f"cpu/cpu{core}/topology/thread_siblings_list"))
        for core in cores
    }
    groups, left = [], set(cores)
    while left:
        first = min(left)
        groups.append(frozenset(left & (found[first] | {first})))
        left -= groups[-1]
    return groups


def nodes(cores: Collection[int], system: Path = SYSTEM) -> list[frozenset[int]]:
    """Return these cores by the memory they are near to (NUMA); all together if nobody says."""
    lists = system.glob("node/node[0-9]*/cpulist")
    near = [parse_cores(_read(path)) & frozenset(cores) for path in lists]
    return sorted(filter(None, near), key=min) or [frozenset(cores)]


def quota(process: Path = Path("/proc/self/cgroup"), groups: Path = GROUPS) -> float:
    """Return how many cores' time the process may take (cpu.max of its control groups)."""
    least = inf
    lines = _read(process).splitlines()
    own = groups / next((line[4:] for line in lines if line.startswith("0::/")), "")
    for group in (own, *own.parents):
        share, _, period = _read(group / "cpu.max").partition(" ")
        if share.isdecimal() and period.strip().isdecimal():
            least = min(least, int(share) / int(period))
    return least


def best_threads() -> int:
    """Return the best number of threads: one for each physical core, within the CPU quota."""
    cores = own_cores()
    count = len(physical_cores(cores)) if cores else os.cpu_count() or 1
    return max(1, min(count, ceil(min(quota(), count))))


def run_on(cores: Collection[int]) -> None:
    """Pin this process to these cores: all its threads, and those it will start.

    Raises:
        ValueError: It may not run on them; the message says on which it may.
        OSError: The system lets it choose none.
    """
    may = own_cores()
    if not cores or not may.issuperset(cores):
        raise ValueError(
            f"--cores {format_cores(cores)}: this process may run on "
            f"{format_cores(may) or 'whatever the system chooses'}; name only some of these, or "
            "leave --cores out"
        )
    if sys.platform != "linux":
        return
    # A library that was imported has begun its threads already.
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(int(thread), cores)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not on this system, or hidden from us
        return ""
