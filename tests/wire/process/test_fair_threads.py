"""Clients share threads fairly, none has all of them, and abandoned work is not done."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from weakref import finalize

import pytest

from wire.errors import ErrorCode, WireError
from wire.process.fair_threads import FairThreads

LONG_S = 60  # for what happens at once


class Pool:
    """Threads, and work that lasts until it is ended by name."""

    def __init__(self, num_threads: int, max_waiting: int = 100) -> None:
        self.threads = FairThreads(num_threads, "test", max_waiting)
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._ended: set[str] = set()

    def submit(self, name: str, client: str = "") -> Future[str]:
        return self.threads.submit(client or name[0], self.work(name))

    def work(self, name: str) -> Callable[[], str]:
        def work() -> str:
            with self._changed:
                self.begun.append(name)
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: name in self._ended, LONG_S)
            return name

        return work

    def end(self, *names: str) -> None:
        with self._changed:
            self._ended.update(names)
            self._changed.notify_all()

    def assert_begun(self, *names: str) -> None:
        """Wait until so many have begun, which are these, in this order."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= len(names), LONG_S)
            assert self.begun == list(names)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.threads.shutdown()


def test_results_and_errors_of_work_are_returned(pool: Pool) -> None:
    assert pool.threads.submit("a", lambda: 7).result(LONG_S) == 7
    with pytest.raises(ZeroDivisionError):
        pool.threads.submit("a", lambda: 1 // 0).result(LONG_S)
    assert pool.threads.submit("a", threading.get_ident).result(LONG_S) != threading.get_ident()


def test_a_thread_is_free_for_other_clients(pool: Pool) -> None:
    kept = [pool.submit(f"a{number}") for number in range(5)]
    pool.assert_begun("a0")
    other = pool.submit("b")
    pool.assert_begun("a0", "b")
    pool.end("b")
    assert other.result(LONG_S) == "b"
    pool.end("a0")
    pool.assert_begun("a0", "b", "a1")
    pool.end(*(f"a{number}" for number in range(5)))
    assert [each.result(LONG_S) for each in kept] == ["a0", "a1", "a2", "a3", "a4"]


def test_clients_take_turns_and_wait_for_one_job_of_another() -> None:
    pool = Pool(1)
    names = ["a0", "a1", "a2", "b0", "b1", "c"]
    kept = [pool.submit(name) for name in names]
    pool.end(*names)
    assert not wait(kept, LONG_S).not_done
    assert pool.begun == ["a0", "b0", "c", "a1", "b1", "a2"]
    pool.threads.shutdown()


def test_a_turn_ends_when_work_begins() -> None:
    pool = Pool(3)
    kept = []
    for name in "xyz":
        kept.append(pool.submit(name))
        pool.assert_begun(*"xyz"[: len(kept)])
    kept += [pool.submit(name) for name in ("a0", "a1", "b")]
    pool.end("x")
    pool.assert_begun("x", "y", "z", "a0")
    pool.end("y")
    pool.assert_begun("x", "y", "z", "a0", "b")
    pool.end("z", "a0", "a1", "b")
    assert not wait(kept, LONG_S).not_done
    pool.threads.shutdown()


def test_work_that_is_cancelled_is_not_done(pool: Pool) -> None:
    first, second, third = (pool.submit(f"a{number}") for number in range(3))
    pool.assert_begun("a0")
    assert second.cancel() and not first.cancel()
    pool.end("a0", "a2")
    assert third.result(LONG_S) == "a2"
    assert pool.begun == ["a0", "a2"]


def test_work_whose_future_nobody_holds_is_not_done(pool: Pool) -> None:
    first = pool.submit("a0")
    pool.submit("a1")
    third = pool.submit("a2")
    gc.collect()
    pool.end("a0", "a2")
    assert (first.result(LONG_S), third.result(LONG_S)) == ("a0", "a2")
    assert pool.begun == ["a0", "a2"]


def test_a_client_has_no_more_waiting_than_it_may() -> None:
    pool = Pool(1, max_waiting=2)
    kept = [pool.submit(name) for name in ("a0", "a1", "a2")]
    with pytest.raises(WireError, match="2 requests of this client wait for a thread") as caught:
        pool.submit("a3")
    assert caught.value.code is ErrorCode.OVERLOADED
    kept.append(pool.submit("b"))
    kept[1].cancel()
    kept.append(pool.submit("a4"))
    pool.end("a0", "a2", "a4", "b")
    assert not wait(kept, LONG_S).not_done
    assert pool.begun == ["a0", "b", "a2", "a4"]
    pool.threads.shutdown()


def test_work_for_several_is_done_once_in_the_turn_that_comes_first(pool: Pool) -> None:
    kept = [pool.submit(f"a{number}") for number in range(4)]
    pool.assert_begun("a0")
    for _ in range(2):
        pool.threads.join("b", kept[3])
        pool.assert_begun("a0", "a3")
    pool.end("a3")
    assert kept[3].result(LONG_S) == "a3"
    pool.threads.join("c", kept[3])  # that is done
    pool.end("a0", "a1", "a2")
    assert not wait(kept, LONG_S).not_done
    assert pool.begun == ["a0", "a3", "a1", "a2"]


def test_work_for_several_that_is_cancelled_is_in_no_line() -> None:
    pool = Pool(1)
    kept = [pool.submit(name) for name in ("a0", "a1", "b")]
    pool.threads.join("b", kept[1])
    kept.append(pool.submit("b last"))
    kept[1].cancel()
    pool.end("a0", "b", "b last")
    assert not wait(kept, LONG_S).not_done
    assert pool.begun == ["a0", "b", "b last"]
    pool.threads.shutdown()


def test_the_work_is_freed_before_its_result(pool: Pool) -> None:
    """As a body is, while its result may be kept."""

    class Body:
        pass

    def use(body: Body) -> int:
        del body
        return 1

    body, is_gone = Body(), threading.Event()
    finalize(body, is_gone.set)
    future = pool.threads.submit("a", partial(use, body))
    assert future.result(LONG_S) == 1
    del body
    assert is_gone.wait(LONG_S)


def test_nothing_is_begun_after_the_end() -> None:
    pool = Pool(1)
    kept = [pool.submit(name) for name in ("a0", "a1", "b")]
    pool.assert_begun("a0")
    pool.threads.shutdown()
    pool.end("a0")
    assert kept[0].result(LONG_S) == "a0"
    assert not wait(kept, timeout=0).not_done
    for each in kept[1:]:
        with pytest.raises(CancelledError):
            each.result(LONG_S)
    assert pool.begun == ["a0"]
