"""The memory of this machine that a process can still take."""

from __future__ import annotations

from pathlib import Path


def free_memory(
    meminfo: Path = Path("/proc/meminfo"), control_group: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the free memory in bytes, within the limit of the cgroup; None if unknown."""
    if not meminfo.exists():
        return None
    free = 1024 * _figures(meminfo.read_text().replace(":", ""))["MemAvailable"]
    limit, usage, stat = (control_group / f"memory.{name}" for name in ("max", "current", "stat"))
    if not limit.exists() or not limit.read_text().strip().isdecimal():  # "max" is no limit
        return free
    # The page cache counts as used memory, but the kernel reclaims it when memory is needed.
    figures = _figures(stat.read_text())
    used = int(usage.read_text()) - figures["active_file"] - figures["inactive_file"]
    return max(0, min(free, int(limit.read_text()) - used))


def _figures(text: str) -> dict[str, int]:
    return {words[0]: int(words[1]) for words in map(str.split, text.splitlines())}
