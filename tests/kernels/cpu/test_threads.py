"""Each share is taken once, on any number of threads; the cache on disk is used, not needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import numpy.typing as npt
import pytest

from kernels.cpu import threads as team
from kernels.cpu.intrinsics import fetch_add, ints_at


def count(words, _thread):  # type: ignore[no-untyped-def]
    """Add one to each of words[2] integers at words[3]."""
    numbers = ints_at(words[3])
    while True:
        share = fetch_add(words[0], 1)
        if share >= words[2]:
            return
        numbers[share] += 1


def count_up(numbers: npt.NDArray[np.int32], num_threads: int) -> None:
    words = np.array([0, 0, len(numbers), numbers.ctypes.data])
    words[0] = words.ctypes.data + 8
    team.run(team.compiled(count), words.ctypes.data, num_threads)


def numbers_after(num_threads: int) -> list[int]:
    numbers = np.zeros(1000, np.int32)
    count_up(numbers, num_threads)
    return numbers.tolist()


@pytest.mark.parametrize("num_threads", [0, 1, 2, 7])
def test_every_share_is_taken_once(num_threads: int) -> None:
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
    monkeypatch.setattr(team, "team_of", lambda _: None)
    assert numbers_after(4) == [1] * 1000


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
