"""The activity of one router process: its requests, and sums over them.

`Watch.look` reads the open requests.  From `start` to `stop` the watch is one of
`Dispatcher.observers`, to count requests that end; it costs nothing otherwise.  Sums only grow, so
that several processes can look at one, each at its own pace.  There are no texts and no clients.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache
from math import log
from typing import Final

from msgspec import Struct, structs

from router.core.cluster import ProcessState
from router.core.dispatcher import Dispatcher
from router.core.history.record import Record
from router.core.history.timeline import timeline
from router.core.request import RequestEnd
from router.core.state import Phase, RequestState

# The most open requests that a look lists, the oldest first; the most others that have ended since
# the last look; and the most that had ended before the start.
MAX_OPEN: Final = 40
MAX_ENDED: Final = 32
MAX_EARLIER: Final = 60
# Transfers are counted between so many pairs of workers.
MAX_LINKS: Final = 1024
# Durations are counted in buckets, each 10 % longer than the one before; the first is of 10 us.
FIRST_S: Final = 1e-5
GROWTH: Final = 1.1
_LOG_GROWTH: Final = log(GROWTH)


class Row(Struct, frozen=True, omit_defaults=True):
    """One request; times are in seconds, and `at` is when it was submitted, on the core's clock.

    `state` is the phase of an open request, or the outcome of one that has ended; then `total_s` is
    known.  The last attempt's transfer of KV took `transfer_s`, from `transfer_at_s` after `at` on.
    """

    key: str
    id: str
    at: float
    state: str
    prompt: int
    cached: int = 0
    tokens: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    transfer_at_s: float | None = None
    transfer_s: float | None = None
    total_s: float | None = None
    kv_bytes: int = 0
    prefill: str = ""
    decode: str = ""
    attempts: int = 0


class Work(Struct):
    """Tokens of a worker: prompt tokens read, those of them it had cached, and tokens generated."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def add(self, prompt: int = 0, cached: int = 0, generated: int = 0) -> None:
        """Count more tokens."""
        self.prompt += prompt
        self.cached += cached
        self.generated += generated


class Sums(Struct):
    """Counts that grow from `Watch.start` on.

    Attributes:
        ended: The number of requests that have ended, by outcome.
        ttft: The number of first tokens by time to first token (`bucket`).
        itl: The number of further tokens by the time between two, averaged between two looks.
        work: The tokens of each worker, by name; "" for a worker that is not known.
        links: The bytes of KV and the seconds that they took, by "prefill-0>decode-0".
    """

    ended: dict[str, int]
    ttft: dict[int, int]
    itl: dict[int, int]
    work: dict[str, Work]
    links: dict[str, tuple[int, float]]


class Activity(Struct):
    """A process at one look: `rows` are its open requests and those that have ended lately."""

    now: float
    state: ProcessState
    rows: list[Row]
    sums: Sums


class Watch:
    """Computes the `Activity` of this process from `start` to `stop`.

    Args:
        state: Returns the state of this process.
        clock: The core's clock, which all processes of a machine share.
    """

    def __init__(
        self, dispatcher: Dispatcher, state: Callable[[], ProcessState], clock: Callable[[], float]
    ) -> None:
        self._dispatcher = dispatcher
        self._state = state
        self._clock = clock
        self._forget()

    def _forget(self) -> None:
        self._sums = Sums(Counter(), Counter(), Counter(), {}, {})  # `look` makes its work
        # The work of ended requests; `Sums.work` has that of open ones too.
        self._done: dict[str, Work] = {}
        # The number of tokens of each open request, and when a look first saw so many, by handle.
        self._seen: dict[int, tuple[int, float]] = {}
        # The open requests that the last look listed.
        self._listed: set[int] = set()
        self._ended: deque[tuple[float, Row]] = deque(maxlen=2 * (MAX_OPEN + MAX_ENDED))
        self._num_sampled = 0

    def start(self) -> None:
        """Begin to count ends of requests."""
        self._forget()
        now = self._clock()
        for record in reversed(self._dispatcher.history.latest(MAX_EARLIER)):
            if record.end is not None:
                self._ended.append((now, _ended_row(record)))
        self._seen = {
            each.handle: (len(each.generated), now)
            for each in self._dispatcher.open_requests
            if each.first_at is not None
        }
        self._dispatcher.observers.append(self)

    def stop(self) -> None:
        """Cease to count, and forget everything."""
        self._dispatcher.observers.remove(self)
        self._forget()

    def look(self, since: float) -> Activity:
        """Return the activity, with the rows of requests that ended after `since`."""
        state, now = self._state(), self._clock()
        self._num_sampled = 0
        opened = self._dispatcher.open_requests
        listed = list(itertools.islice(opened, MAX_OPEN))
        self._listed = {each.handle for each in listed}
        names = {f"{row['role']}-{row['rank']}" for row in state.workers}
        self._done = {name: work for name, work in self._done.items() if name in names or not name}
        work = {name: Work(*structs.astuple(done)) for name, done in self._done.items()}
        self._seen = {each.handle: self._progress(each, work, now) for each in opened}
        rows = [row for at, row in self._ended if at > since]
        rows += [_open_row(each) for each in listed]
        sums = self._sums
        copied = Sums(dict(sums.ended), dict(sums.ttft), dict(sums.itl), work, dict(sums.links))
        return Activity(now, state, rows, copied)

    def on_request_end(self, end: RequestEnd) -> None:
        """Count a request that has ended."""
        now, sums, record = self._clock(), self._sums, end.record
        sums.ended[end.outcome] += 1
        count, at = self._seen.pop(end.handle, (0, 0.0))
        if not count and end.ttft_s is not None:
            sums.ttft[bucket(end.ttft_s)] += 1
            count, at = 1, now - (end.decode_s or 0.0)
        if (num_new := end.completion_tokens - count) > 0:
            sums.itl[bucket((now - at) / num_new)] += num_new
        prefill, decode = _workers(record)
        if end.ttft_s is not None:
            _add(self._done, prefill or decode, end.prompt_tokens, end.cached_tokens)
        _add(self._done, decode or prefill, 0, 0, end.completion_tokens)
        if end.kv_bytes and end.kv_transfer_seconds and prefill and decode:
            self._count_transfer(f"{prefill}>{decode}", end)
        is_listed = end.handle in self._listed
        if record is not None and (is_listed or self._num_sampled < MAX_ENDED):
            self._num_sampled += not is_listed
            self._ended.append((now, _ended_row(record)))

    def _count_transfer(self, link: str, end: RequestEnd) -> None:
        links = self._sums.links
        if link in links or len(links) < MAX_LINKS:
            kv_bytes, seconds = links.get(link, (0, 0.0))
            links[link] = kv_bytes + end.kv_bytes, seconds + end.kv_transfer_seconds

    def _progress(
        self, state: RequestState, work: dict[str, Work], now: float
    ) -> tuple[int, float]:
        """Count the new tokens of an open request; return all of them, and when they were seen."""
        if state.first_at is None or state.first is None:
            return 0, 0.0
        num, sums = len(state.generated), self._sums
        seen, at = self._seen.get(state.handle, (0, 0.0))
        if not seen:
            sums.ttft[bucket(state.first_at - state.submitted_at)] += 1
            seen, at = 1, state.first_at
        if num > seen:
            sums.itl[bucket((now - at) / (num - seen))] += num - seen
            seen, at = num, now
        prefill, decode = _workers(state.record)
        _add(work, prefill or decode, len(state.request.token_ids), state.first.cached_tokens)
        work.setdefault(decode or prefill, Work()).generated += num
        return seen, at


def bucket(duration_s: float) -> int:
    """Return the number of the bucket that counts a duration: FIRST_S * GROWTH ** n and longer."""
    return int(log(max(duration_s, FIRST_S) / FIRST_S) / _LOG_GROWTH)


def _add(work: dict[str, Work], name: str, *counts: int) -> None:
    work.setdefault(name, Work()).add(*counts)


def _workers(record: Record | None) -> tuple[str, str]:
    """Return the names of the prefill and the decode worker of the last attempt, or ""."""
    if record is None or not record.placed:
        return "", ""
    return _name(record.placed[-1].prefill), _name(record.placed[-1].decode)


@lru_cache(maxsize=1024)
def _name(identity: bytes | None) -> str:
    return (identity or b"").decode("ascii").rpartition("-")[0]


_PHASES: Final = {phase: phase.name.lower() for phase in Phase}


def _open_row(state: RequestState) -> Row:
    submitted, first = state.submitted_at, state.first
    prefill, decode = _workers(state.record)
    return Row(
        # Without a history there is no record.
        key=f"{os.getpid()}-{state.handle if state.record is None else state.record.number}",
        id=state.request.name,
        at=_ms(submitted) or 0.0,
        state=_PHASES[state.phase],
        prompt=len(state.request.token_ids),
        cached=0 if first is None else first.cached_tokens,
        tokens=len(state.generated),
        queue_s=None if state.placed_at is None else _ms(state.placed_at - submitted),
        ttft_s=None if state.first_at is None else _ms(state.first_at - submitted),
        prefill=prefill,
        decode=decode,
        attempts=state.num_attempts,
    )


def _ended_row(record: Record) -> Row:
    ended, transfer = record.end, None
    assert ended is not None
    if ended.kv_bytes:
        last = record.placed[-1]
        transfer = timeline(last, last.at, record.submitted_at, lambda _: None).transfer
    prefill, decode = _workers(record)
    return Row(
        key=f"{os.getpid()}-{record.number}",
        id=record.name,
        at=_ms(record.submitted_at) or 0.0,
        state=ended.outcome,
        prompt=record.num_tokens,
        cached=ended.cached_tokens,
        tokens=ended.completion_tokens,
        queue_s=_ms(ended.queue_s),
        ttft_s=_ms(ended.ttft_s),
        transfer_at_s=None if transfer is None else _ms(transfer.at_s),
        transfer_s=None if transfer is None else _ms(transfer.duration_s),
        total_s=_ms(ended.total_s),
        kv_bytes=ended.kv_bytes,
        prefill=prefill,
        decode=decode,
        attempts=len(record.placed),
    )


def _ms(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(duration_s, 4)
