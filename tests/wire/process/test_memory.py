"""Free memory of this machine and of containers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from wire.process.memory import free_memory


def test_this_machine_has_memory_left() -> None:
    free = free_memory()
    assert free is None or 0 < free < 1 << 50
    assert not sys.platform.startswith("linux") or free is not None


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 2048), ("1500", 1500 - (900 - 300)), ("500", 0)]
)
def test_a_container_may_allow_less_than_the_machine_has(
    tmp_path: Path, limit: str, expected: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:   2 kB\nHugePages_Free: 0\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 600\nactive_file 100\ninactive_file 200\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == expected


def test_where_nothing_says_it_is_unknown(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "meminfo", tmp_path) is None
