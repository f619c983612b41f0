"""A thread pool that serves clients round-robin, and never gives all threads to one client.

A client with many long jobs can use all threads but one, so another client waits for at most one
job.
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
    """A thread pool that is fair to clients.

    If it has more than one thread, one client can use all but one of them at a time.
    """

    def __init__(self, num_threads: int, name: str, max_waiting: int = MAX_WAITING) -> None:
        """Create the pool; at most `max_waiting` jobs of one client may be queued."""
        self._num_threads = num_threads
        self._most_of_client = max(num_threads - 1, 1)
        self._name = name
        self._max_waiting = max_waiting
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._lock = Lock()
        self._waiting: FairQueue[Hashable, ReferenceType[_Job[Any]]] = FairQueue()
        self._running: Counter[Hashable] = Counter()

    def submit(self, client: Hashable, work: Callable[[], T]) -> Future[T]:
        """Queue a job for a client and return its Future.

        A queued job is dropped when its Future is cancelled or garbage-collected.  Raises WireError
        (OVERLOADED) if too many jobs of this client are queued.
        """
        job = _Job(work)
        with self._lock:
            if self._waiting.num_of(client) >= self._max_waiting:
                raise WireError(
                    ErrorCode.OVERLOADED,
                    f"{self._max_waiting} requests of this client wait for a thread "
                    f"({self._name}) already; send fewer at a time",
                )
            self._enqueue(client, job)
            self._start()
        job.add_done_callback(self._on_done)
        return job

    def join(self, client: Hashable, future: Future[T]) -> None:
        """Queue a submitted job for a second client too; it runs once, at the earlier turn."""
        assert isinstance(future, _Job)
        with self._lock:
            if not (future.running() or future.done()):
                self._enqueue(client, future)
                self._start()

    def shutdown(self) -> None:
        """Drop queued jobs, and stop the threads without waiting for running jobs."""
        waiting = []
        with self._lock:
            while (first := self._waiting.first()) is not None:
                self._waiting.remove(*first)
                waiting.append(first[1]())
        for job in waiting:
            if job is not None and job.cancel():
                job.set_running_or_notify_cancel()
        self._pool.shutdown(wait=False)

    def _enqueue(self, client: Hashable, job: _Job[Any]) -> None:
        job.clients.add(client)
        self._waiting.add(client, job.ref)

    def _on_done(self, job: Future[Any]) -> None:
        """Dequeue a cancelled job.  This is the done callback of every job."""
        assert isinstance(job, _Job)
        with self._lock:
            if self._dequeue(job):
                job.set_running_or_notify_cancel()  # notifies `concurrent.futures.wait`

    def _dequeue(self, job: _Job[Any]) -> bool:
        """Remove a job from the queue of every client; return whether it was queued."""
        removed = [self._waiting.remove(client, job.ref) for client in job.clients]
        return any(removed)

    def _start(self) -> None:
        """Start the next jobs on free threads."""
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
            self._dequeue(job)
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
            self._waiting.end_turn(client)  # clients that came meanwhile precede this one
            self._start()


class _Job(Future[T], Generic[T]):
    """A job and the clients for which it is queued.  The queue has only a weak reference to it."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self.clients: set[Hashable] = set()
        self.ref = ref(self)
        self._work: Callable[[], T] | None = work

    def run(self) -> None:
        """Run the job.  Its closure is released first, so that the Future keeps only the result."""
        work, self._work = self._work, None
        assert work is not None
        try:
            result = work()
        except BaseException as error:
            self.set_exception(error)
            # Break the cycle: the error's traceback has this frame, whose `self` has the error.
            self = None  # type: ignore[assignment]
        else:
            self.set_result(result)
