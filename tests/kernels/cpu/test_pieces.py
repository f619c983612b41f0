"""Whatever the threads take and in which order, every panel is taken once, and nobody jumps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.pieces import MAX_PIECE, next_piece, take

Taken = list[tuple[int, int, int]]


def taken(total: int, num_threads: int, order: list[int]) -> Taken:
    """Let threads take in some order, then the first what is left: (thread, first, count)."""
    word = np.zeros(1, np.int64)
    pieces = []
    for thread in [*order, *[0] * total]:
        expected = next_piece(int(word[0]), total, num_threads, thread)
        assert take(word.ctypes.data, total, num_threads, thread) == expected
        if expected[1]:
            pieces.append((thread, *expected))
    return pieces


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    num_threads = draw(st.integers(1, 20))
    order = draw(st.lists(st.integers(0, num_threads - 1), max_size=60))
    return draw(st.integers(0, 300)), num_threads, order


@settings(deadline=None)  # the first one compiles
@given(workloads())
def test_every_panel_is_taken_once(workload: tuple[int, int, list[int]]) -> None:
    panels = [
        panel for _, first, count in taken(*workload) for panel in range(first, first + count)
    ]
    assert sorted(panels) == list(range(workload[0]))


@settings(deadline=None)  # the first one compiles
@given(workloads())
def test_an_end_is_read_on_where_it_was(workload: tuple[int, int, list[int]]) -> None:
    front, back = 0, workload[0]
    for thread, first, count in taken(*workload):
        assert count in (1, 2, 4, MAX_PIECE)
        if thread % 2:
            assert first + count == back
            back = first
        else:
            assert first == front
            front += count


@pytest.mark.parametrize("num_threads", [2, 4, 16])
def test_the_last_pieces_are_the_smallest(num_threads: int) -> None:
    pieces = taken(200, num_threads, list(range(num_threads)) * 200)
    counts = [count for _, _, count in pieces]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == MAX_PIECE
    assert counts[-num_threads:] == [1] * num_threads


def test_one_thread_has_nobody_to_wait_for() -> None:
    assert [count for _, _, count in taken(30, 1, [])] == [8, 8, 8, 4, 2]
