"""Lists of cores, topology, quotas, and pinning a process."""

from __future__ import annotations

import os
import subprocess
import sys
from math import inf
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.payloads import Cores
from wire.process.cores import (
    best_threads,
    format_cores,
    nodes,
    own_cores,
    parse_cores,
    physical_cores,
    quota,
    run_on,
)


@given(st.frozensets(st.integers(0, 99)))
def test_a_list_is_read_as_it_is_written_and_may_cross_the_wire(cores: frozenset[int]) -> None:
    text = format_cores(cores)
    assert parse_cores(text) == cores
    assert msgspec.convert(text, Cores) == text


@pytest.mark.parametrize(
    ("text", "cores"),
    [("", ""), ("0", "0"), ("3,1,2", "1-3"), ("0-3,8", "0-3,8"), (" 1, 2-2\n", "1-2")],
)
def test_runs_are_the_longest_there_are(text: str, cores: str) -> None:
    assert format_cores(parse_cores(text)) == cores


@pytest.mark.parametrize("text", ["a", "-1", "3-1", "1-", "0x3", "65536", "99999", "1;2", "0-3:1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a core nor a run of them; write"):
        parse_cores(text)


def machine(root: Path) -> Path:
    """Two nodes of two physical cores with two threads each, and one of memory only."""
    for node, cores in enumerate(("0-1,4-5", "2-3,6-7", "")):
        (root / f"node/node{node}").mkdir(parents=True)
        (root / f"node/node{node}/cpulist").write_text(f"{cores}\n")
    for core in range(8):
        (root / f"cpu/cpu{core}/topology").mkdir(parents=True)
        siblings = root / f"cpu/cpu{core}/topology/thread_siblings_list"
        siblings.write_text(f"{core % 4},{core % 4 + 4}\n")
    return root


@pytest.mark.parametrize(
    ("cores", "physical", "near"),
    [
        ("0-7", ["0,4", "1,5", "2,6", "3,7"], ["0-1,4-5", "2-3,6-7"]),
        ("0-2", ["0", "1", "2"], ["0-1", "2"]),
        ("3,6-7", ["3,7", "6"], ["3,6-7"]),
    ],
)
def test_how_the_cores_of_a_process_lie(
    tmp_path: Path, cores: str, physical: list[str], near: list[str]
) -> None:
    system, own = machine(tmp_path), parse_cores(cores)
    assert [format_cores(it) for it in physical_cores(own, system)] == physical
    assert [format_cores(it) for it in nodes(own, system)] == near


def test_where_nobody_says_each_core_is_one_and_all_are_near(tmp_path: Path) -> None:
    assert physical_cores({1, 0}, tmp_path) == [{0}, {1}]
    assert nodes({1, 0}, tmp_path) == [{0, 1}]


def test_a_core_is_of_one_physical_core_even_where_only_one_of_the_two_says_so(
    tmp_path: Path,
) -> None:
    system = machine(tmp_path)
    (system / "cpu/cpu4/topology/thread_siblings_list").unlink()
    assert [format_cores(it) for it in physical_cores({0, 1, 4}, system)] == ["0,4", "1"]


@pytest.mark.parametrize(
    ("own", "parent", "cores"),
    [("150000 100000", "max 100000", 1.5), ("max 100000", "200000 50000", 4.0), ("", "", inf)],
)
def test_the_least_share_of_a_control_group_and_those_above_it(
    tmp_path: Path, own: str, parent: str, cores: float
) -> None:
    (tmp_path / "cgroup").write_text("3:cpuset:/\n0::/a/b\n")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/cpu.max").write_text(f"{own}\n")
    (tmp_path / "a/cpu.max").write_text(f"{parent}\n")
    assert quota(tmp_path / "cgroup", tmp_path) == cores
    assert quota(tmp_path / "none", tmp_path) == inf


@pytest.mark.parametrize(
    ("time", "threads"), [(inf, 3), (8.0, 3), (3.0, 3), (2.1, 3), (2.0, 2), (1.5, 2), (0.2, 1)]
)
def test_a_part_of_a_core_takes_a_thread_too(
    monkeypatch: pytest.MonkeyPatch, time: float, threads: int
) -> None:
    physical = [frozenset({core, core + 3}) for core in range(3)]
    monkeypatch.setattr("wire.process.cores.own_cores", lambda: frozenset(range(6)))
    monkeypatch.setattr("wire.process.cores.physical_cores", lambda _: physical)
    monkeypatch.setattr("wire.process.cores.quota", lambda: time)
    assert best_threads() == threads


PINNED = """
import os, threading
from wire.process.cores import own_cores, run_on
waiting = threading.Event()
thread = threading.Thread(target=waiting.wait)
thread.start()
core = max(own_cores())
run_on({core})
for each in os.listdir("/proc/self/task"):
    assert os.sched_getaffinity(int(each)) == {core}
waiting.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are kept to cores on Linux only")
def test_every_thread_of_the_process_is_kept_to_the_cores() -> None:
    subprocess.run([sys.executable, "-c", PINNED], check=True, timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are kept to cores on Linux only")
def test_cores_that_it_may_not_use_are_refused_and_nothing_changes() -> None:
    before = os.sched_getaffinity(0)
    assert own_cores() == before
    for cores in (set(), {0, 65_535}):
        with pytest.raises(ValueError, match="this process may run on"):
            run_on(cores)
    assert os.sched_getaffinity(0) == before
