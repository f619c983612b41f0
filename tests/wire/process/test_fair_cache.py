"""Slow results are computed once, and no client evicts another's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Event

import pytest

from wire.process.fair_cache import FairCache
from wire.process.fair_threads import FairThreads

LONG_S = 60  # for what happens at once


class Squares:
    """A cache of squares of at most four numbers; `computed` has those that were not known."""

    def __init__(self) -> None:
        self.threads = FairThreads(2, "test")
        self.cache: FairCache[int, int] = FairCache(self.threads, 4)
        self.computed: list[int] = []

    def ask(self, client: str, number: int) -> int:
        return self.cache.get(client, number, self.work(number)).result(LONG_S)

    def work(self, number: int) -> Callable[[], int]:
        def work() -> int:
            self.computed.append(number)
            return number**2

        return work


@pytest.fixture
def squares() -> Iterator[Squares]:
    squares = Squares()
    yield squares
    squares.threads.shutdown()


def test_a_known_result_is_not_computed_again(squares: Squares) -> None:
    assert [squares.ask(client, 3) for client in "aab"] == [9, 9, 9]
    assert squares.computed == [3]
    known = squares.cache.get("c", 3, squares.work(3))
    assert known.done(), "without waiting for a thread"


def test_the_least_recently_used_goes_first(squares: Squares) -> None:
    for number in (1, 2, 3, 4, 1, 5, 1, 2):
        squares.ask("a", number)
    assert squares.computed == [1, 2, 3, 4, 5, 2]


def test_a_client_with_ever_new_ones_pushes_out_its_own(squares: Squares) -> None:
    squares.ask("few", 0)
    for number in range(1, 20):
        squares.ask("many", number)
    squares.computed.clear()
    for number in (0, 17, 18, 19):
        squares.ask("few", number)
    assert squares.computed == []


def test_a_client_without_results_is_forgotten(squares: Squares) -> None:
    for client in "abcdefg":
        squares.ask(client, ord(client))
    squares.computed.clear()
    for client in "defg":
        squares.ask(client, ord(client))
    assert squares.computed == []
    squares.cache.clear()
    squares.ask("g", ord("g"))
    assert squares.computed == [ord("g")]


def test_a_result_under_way_is_shared_and_runs_in_the_first_turn(
    squares: Squares,
) -> None:
    may_end = Event()

    def slow() -> int:
        assert may_end.wait(LONG_S)
        return 0

    kept: list[Future[int]] = [squares.cache.get("a", 0, slow)]  # all that "a" may have of threads
    kept += [squares.cache.get("a", number, squares.work(number)) for number in (1, 2)]
    assert squares.computed == []
    assert squares.ask("b", 2) == 4
    assert squares.cache.get("b", 0, slow) is kept[0]
    may_end.set()
    assert [each.result(LONG_S) for each in kept] == [0, 1, 4]
    assert squares.computed == [2, 1]


def test_a_cancelled_result_is_computed_on_the_next_request(squares: Squares) -> None:
    may_end = Event()
    first = squares.cache.get("a", 0, lambda: int(may_end.wait(LONG_S)))
    squares.ask("b", 2)
    second = squares.cache.get("a", 1, squares.work(1))
    assert second.cancel()
    again = squares.cache.get("a", 1, squares.work(1))
    may_end.set()
    assert (first.result(LONG_S), again.result(LONG_S)) == (1, 1)
    squares.ask("b", 3)
    squares.ask("b", 4)  # one too many of theirs
    squares.computed.clear()
    for number in (0, 1):
        squares.ask("a", number)
    assert squares.computed == [], "what was cancelled does not count"
