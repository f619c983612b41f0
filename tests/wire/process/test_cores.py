"""Lists of cores, and a process that is kept to some."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.payloads import Cores
from wire.process.cores import format_cores, own_cores, parse_cores, run_on


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


@pytest.mark.parametrize("text", ["a", "-1", "3-1", "1-", "0x3", "99999", "1;2", "0-3:1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a core nor a run of them; write"):
        parse_cores(text)


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
