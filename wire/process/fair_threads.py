"""A thread pool in which clients take turns, and no client has all threads.

A client with much long work uses every thread but one; others wait for one of its jobs at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Final, Generic, TypeVar
from weakref import ReferenceType, ref

from wire.errors import ErrorCode, WireError
from wire.process.fair_queue import FairQueue

T = TypeVar("T")

# Half of a router's connections (4096), and several times the sequences of a worker.
MAX_WAITING: Final = 2048


class FairThreads:
    """Runs the work of clients in threads.

    With more than one thread, one less runs work of the same client at a time.
    """

    def __init__(self, num_threads: int, name: str, max_waiting: int = MAX_WAITING) -> None:
        """Start no thread before the first work; `max_waiting` jobs of one client may wait."""
        self._num_threads = num_threads
        self._most_of_client = max(num_threads - 1, 1)
        self._name = name
        self._max_waiting = max_waiting
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._lock = Lock()
        self._waiting: FairQueue[Hashable, ReferenceType[_Job[Any]]] = FairQueue()
        self._running: Counter[Hashable] = Counter()

    def submit(self, client: Hashable, work: Callable[[], T]) -> Future[T]:
        """Have `work` done in the client's turn.

        Work that waits is dropped when its Future is cancelled, or when nobody holds the Future.
        Raises WireError: OVERLOADED; too much work of this client waits.
        """
        job = _Job(work)
        with self._lock:
            if self._waiting.num_of(client) >= self._max_waiting:
                raise WireError(
                    ErrorCode.OVERLOADED,
                    f"{self._max_waiting} requests of this client wait for a thread "
                    f"({self._name}) already; send fewer at a time",
                )
            self._enter(client, job)
            self._start()
        job.add_done_callback(self._leave)
        return job

    def join(self, client: Hashable, future: Future[T]) -> None:
        """Let submitted work also run in this client's turn, whichever comes first."""
        assert isinstance(future, _Job)
        with self._lock:
            if not (future.running() or future.done()):
                self._enter(client, future)
                self._start()

    def shutdown(self) -> None:
        """Drop queued work and stop the threads without waiting for work under way."""
        waiting = []
        with self._lock:
            while (first := self._waiting.first()) is not None:
                self._waiting.remove(*first)
                waiting.append(first[1]())
        for job in waiting:
            if job is not None and job.cancel():
                job.set_running_or_notify_cancel()
        self._pool.shutdown(wait=False)

    def _enter(self, client: Hashable, job: _Job[Any]) -> None:
        job.clients.add(client)
        self._waiting.add(client, job.ref)

    def _leave(self, job: Future[Any]) -> None:
        """Dequeue cancelled work; its Future calls this at every end."""
        assert isinstance(job, _Job)
        with self._lock:
            if self._forget(job):
                job.set_running_or_notify_cancel()  # which tells `concurrent.futures.wait`

    def _forget(self, job: _Job[Any]) -> bool:
        """Take work out of every line, and tell whether it was in one."""
        removed = [self._waiting.remove(client, job.ref) for client in job.clients]
        return any(removed)

    def _start(self) -> None:
        """Give threads that are free their next work."""
        while self._running.total() < self._num_threads:
            barred = [each for each, num in self._running.items() if num >= self._most_of_client]
            first = self._waiting.first(barred)
            if first is None:
                return
            client, reference = first
            job = reference()
            if job is None:
                self._waiting.remove(client, reference)
                continue
            self._forget(job)
            if job.set_running_or_notify_cancel():
                self._waiting.end_turn(client)
                self._running[client] += 1
                self._pool.submit(self._run, client, job)

    def _run(self, client: Hashable, job: _Job[Any]) -> None:
        job.run()
        with self._lock:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
            self._waiting.end_turn(client)  # those that came meanwhile are first
            self._start()


class _Job(Future[T], Generic[T]):
    """Work, and the clients in whose lines it waits; a line has only a weak `ref` of it."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self.clients: set[Hashable] = set()
        self.ref = ref(self)
        self._work: Callable[[], T] | None = work

    def run(self) -> None:
        """Do the work; its result outlives what it was made from."""
        work, self._work = self._work, None
        assert work is not None
        try:
            result = work()
        except BaseException as error:
            self.set_exception(error)
            self = None  # type: ignore[assignment]  # or the error's traceback would hold it
        else:
            self.set_result(result)
