"""Each round of a loop is taken once, on any number of threads, and nobody jumps to and fro."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from kernels.cpu import threads
from kernels.cpu.intrinsics import ints_at
from kernels.cpu.tasks import record_of, records_at
from kernels.cpu.threads import MAX_CHUNK, next_chunk, take, take_chunk


class Numbers(NamedTuple):
    size: int
    numbers: int
    taken: int = 0


def count(a: Numbers, _thread: int) -> None:
    """Add one to each of some integers."""
    numbers = ints_at(a.numbers)
    while True:
        index = take(a, 1)
        if index >= a.size:
            return
        numbers[index] += 1


def count_up(numbers: npt.NDArray[np.int32], num_threads: int) -> None:
    arguments = record_of(Numbers(len(numbers), numbers.ctypes.data))
    threads.run(count, arguments.ctypes.data, num_threads)


def numbers_after(num_threads: int) -> list[int]:
    numbers = np.zeros(1000, np.int32)
    count_up(numbers, num_threads)
    return numbers.tolist()


@pytest.mark.parametrize("num_threads", [0, 1, 2, 7])
def test_every_round_is_taken_once(num_threads: int) -> None:
    assert numbers_after(num_threads) == [1] * 1000


def test_tasks_one_after_another_and_after_a_sleep() -> None:
    numbers = np.zeros(64, np.int32)
    for _ in range(1000):
        count_up(numbers, 3)
    assert (numbers == 1000).all()
    for _ in range(30):
        # Long enough for the helpers to fall asleep; nothing depends on whether they do.
        Event().wait(0.001)
        count_up(numbers, 3)
    assert (numbers == 1030).all()


def test_two_callers_at_a_time_both_get_their_work_done() -> None:
    def work() -> int:
        numbers = np.zeros(64, np.int32)
        for _ in range(200):
            count_up(numbers, 2)
        return int(numbers.min() + numbers.max())

    with ThreadPoolExecutor(3) as pool:
        assert [future.result() for future in [pool.submit(work) for _ in range(3)]] == [400] * 3


def test_elsewhere_than_on_linux_the_caller_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "team_of", lambda _: None)
    assert numbers_after(4) == [1] * 1000


Taken = list[tuple[int, int, int]]


class Row(NamedTuple):
    taken: int = 0


row_at = records_at(Row)


def _take_chunk_at(address: int, total: int, num_threads: int, thread: int) -> tuple[int, int]:
    return take_chunk(row_at(address), total, total, num_threads, thread)


call_take_chunk: Callable[[int, int, int, int], tuple[int, int]] = njit(_take_chunk_at)


def taken(total: int, num_threads: int, order: list[int]) -> Taken:
    """Let threads take in some order, then the first what is left: (thread, first, count)."""
    row = record_of(Row())
    chunks = []
    for thread in [*order, *[0] * total]:
        expected = next_chunk(int(row["taken"][0]), total, total, num_threads, thread)
        assert call_take_chunk(row.ctypes.data, total, num_threads, thread) == expected
        if expected[1]:
            chunks.append((thread, *expected))
    return chunks


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    num_threads = draw(st.integers(1, 20))
    order = draw(st.lists(st.integers(0, num_threads - 1), max_size=60))
    return draw(st.integers(0, 300)), num_threads, order


@given(workloads())
def test_every_panel_is_taken_once(workload: tuple[int, int, list[int]]) -> None:
    panels = [
        panel for _, first, count in taken(*workload) for panel in range(first, first + count)
    ]
    assert sorted(panels) == list(range(workload[0]))


@given(workloads())
def test_an_end_is_read_on_where_it_was(workload: tuple[int, int, list[int]]) -> None:
    front, back = 0, workload[0]
    for thread, first, count in taken(*workload):
        assert count in (1, 2, 4, MAX_CHUNK)
        if thread % 2:
            assert first + count == back
            back = first
        else:
            assert first == front
            front += count


@pytest.mark.parametrize("num_threads", [2, 4, 16])
def test_the_last_chunks_are_the_smallest(num_threads: int) -> None:
    chunks = taken(200, num_threads, list(range(num_threads)) * 200)
    counts = [count for _, _, count in chunks]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == MAX_CHUNK
    assert counts[-num_threads:] == [1] * num_threads
