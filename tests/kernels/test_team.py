"""Each share is taken once, on any number of threads; the cache on disk is used, not needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kernels import team
from kernels.scalars import fetch_add, ints_at


def count(words):  # type: ignore[no-untyped-def]
    """Add one to each of words[2] integers at words[3]."""
    numbers = ints_at(words[3])
    while True:
        share = fetch_add(words[0], 1)
        if share >= words[2]:
            return
        numbers[share] += 1


def numbers_after(num_threads: int) -> list[int]:
    numbers = np.zeros(1000, np.int32)
    task = team.compiled(count)
    team.run(task, [len(numbers), numbers.ctypes.data], num_threads)
    return numbers.tolist()


@pytest.mark.parametrize("num_threads", [0, 1, 2, 7])
def test_every_share_is_taken_once(num_threads: int) -> None:
    assert numbers_after(num_threads) == [1] * 1000


@pytest.mark.parametrize("num_threads", [2, 7])
def test_without_openmp_python_threads_do_it(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = team._threads_launcher()
    monkeypatch.setattr(team, "_launcher", lambda: pool)
    assert numbers_after(num_threads) == [1] * 1000


def test_the_second_process_finds_it_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "_cache_directory", lambda: tmp_path)
    assert team.compiled(count)._cache_hits == 0
    assert team.compiled(count)._cache_hits == 1


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(team, "_cache_directory", lambda: tmp_path / "file" / "cache")
    assert numbers_after(2) == [1] * 1000


def test_the_cache_follows_every_source() -> None:
    name = team._cache_directory().name
    assert len(name) == 16 and int(name, 16) >= 0
