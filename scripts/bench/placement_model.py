"""A model of workers for placement: queues, caches, a link and steps, on virtual time.

The router's side is real: `router.core` has the fleet, the prefix index and the placement.  A model
worker reads prompts one after another, at a rate, keeps prefixes in an LRU cache, receives KV one
transfer after another, and generates with a step that grows with the number of sequences.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Final

from msgspec import structs

from router.core.fleet import Fleet, Worker
from router.core.placement import Placement
from router.core.prefixes import PrefixIndex
from router.core.request import Request
from router.core.state import Attempt, Limits, RequestState
from wire.frames import Heartbeat, Hello, Role
from wire.identity import Identity
from wire.layout import KVLayout
from wire.options import Options
from wire.payloads import HelloDetail, Load, Usage
from wire.prefix import prefix_hashes
from worker.engine.blocks import Journal

BEAT_S: Final = 1.0
MAX_TOKENS: Final = 2**31 - 1


@dataclass(frozen=True)
class Shape:
    """The cluster: its workers, their caches in tokens, and what they are capable of."""

    num_prefill: int = 8
    num_decode: int = 8
    cache_tokens: int = 4_000_000
    block_size: int = 512
    prompt_tokens_per_s: float = 5000.0
    step_s: float = 0.02
    sequence_s: float = 0.0002
    link_bytes_per_s: float = 2e9
    kv_layers: int = 32  # of 8 heads of 128 16-bit numbers, keys and values: 128 KiB a token


@dataclass(frozen=True)
class Arrival:
    """A request: its prompt, the length of its answer, and what to do at its end."""

    at_s: float
    token_ids: tuple[int, ...]
    answer: tuple[int, ...]
    on_end: Callable[[float], Arrival | None] = field(default=lambda now: None)


@dataclass(eq=False)
class Served:
    """One request in the model."""

    arrival: Arrival
    state: RequestState
    attempt: Attempt | None = None
    num_cached: int = 0
    num_sent: int = 0
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival.at_s


class ModelWorker:
    """One worker: its cache as the engine would have it, and the time for which it is busy."""

    def __init__(self, worker: Worker, shape: Shape) -> None:
        self.worker = worker
        self.busy_s = 0.0
        self.queue: deque[Served] = deque()
        self.is_reading = False
        self.num_running = 0
        self.link_free_s = 0.0
        self.used_blocks = 0
        self._capacity = shape.cache_tokens // shape.block_size
        self._held: OrderedDict[int, None] = OrderedDict()
        self._journal = Journal()

    def match(self, hashes: Sequence[int]) -> int:
        """Return the number of leading blocks that the cache holds."""
        return next((i for i, value in enumerate(hashes) if value not in self._held), len(hashes))

    def keep(self, hashes: Sequence[int]) -> None:
        """Put a prompt's blocks into the cache; the least recently used fall out."""
        for value in reversed(hashes):
            if value not in self._held:
                self._journal.store(value)
            self._held[value] = None
            self._held.move_to_end(value)
        while len(self._held) > self._capacity:
            value, _ = self._held.popitem(last=False)
            self._journal.evict(value)

    def load(self, **speed: float) -> Load:
        """Return the next heartbeat's figures."""
        total = self.worker.detail.num_blocks
        used = min(total, self.used_blocks)
        cached = min(len(self._held), total - used)
        stored, evicted = self._journal.read()
        load = Load(
            total=total,
            used=used,
            cached=cached,
            free=total - used - cached,
            stored=stored,
            evicted=tuple(evicted),
        )
        return structs.replace(load, **speed)


class Model:
    """A cluster that serves arrivals; `make_placement` is the policy."""

    def __init__(
        self, shape: Shape, make_placement: Callable[[Fleet, PrefixIndex, Limits], Placement]
    ) -> None:
        self.shape = shape
        self.now = 0.0
        self.served: list[Served] = []
        self.decision_s: list[float] = []
        self._fleet = Fleet(
            model_fingerprint="model", max_kv_transfer_bytes=2**50, heartbeat_s=BEAT_S
        )
        self._index = PrefixIndex()
        limits = Limits(max_running_per_worker=256)
        self._placement = make_placement(self._fleet, self._index, limits)
        self._handles = count(1)
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._waiting: deque[Served] = deque()
        self.workers = {it.worker.identity: it for it in self._join()}
        self._num_open = 0

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Serve all arrivals, and those that follow from them."""
        self._beat()
        for arrival in arrivals:
            self._come(arrival)
        while self._num_open:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def of_role(self, role: Role) -> list[ModelWorker]:
        return [it for it in self.workers.values() if it.worker.role is role]

    def _join(self) -> Iterator[ModelWorker]:
        shape = self.shape
        layout = KVLayout.uniform(
            num_layers=shape.kv_layers, num_kv_heads=8, head_dim=128, dtype="bfloat16"
        )
        detail = HelloDetail(
            model="model",
            fingerprint="model",
            layout=layout,
            block_size=shape.block_size,
            num_blocks=shape.cache_tokens // shape.block_size,
            max_model_len=MAX_TOKENS,
            max_kv_transfer_bytes=2**50,
            arithmetic="model",
            threads=1,
            kv_endpoint="tcp://127.0.0.1:1",
        )
        for role, num in ((Role.PREFILL, shape.num_prefill), (Role.DECODE, shape.num_decode)):
            for rank in range(num):
                identity = Identity(role, rank, 1)
                joined, _ = self._fleet.hello(identity.name, Hello(1, rank, role), detail, self.now)
                self._index.add(joined.identity, detail.num_blocks)
                yield ModelWorker(joined, shape)

    def _come(self, arrival: Arrival) -> None:
        self._num_open += 1
        self._after(arrival.at_s - self.now, lambda: self._arrive(arrival))

    def _arrive(self, arrival: Arrival) -> None:
        options = Options(max_tokens=len(arrival.answer))
        request = Request(arrival.token_ids, options, len(arrival.answer) - 1)
        state = RequestState(
            handle=next(self._handles),
            request=request,
            sink=_SILENT,
            new_tokens=len(arrival.answer) - 1,
            is_decode_asked=True,
            submitted_at=self.now,
            deadline=float("inf"),
            due=float("inf"),
        )
        self._waiting.append(Served(arrival, state))
        self._place()

    def _place(self) -> None:
        while self._waiting:
            served = self._waiting[0]
            begin = perf_counter()
            served.attempt = self._placement.place(served.state, self.now)
            self.decision_s.append(perf_counter() - begin)
            if served.attempt is None:
                return
            self._waiting.popleft()
            assert served.attempt.prefill is not None
            worker = self.workers[served.attempt.prefill.identity]
            worker.queue.append(served)
            self._read(worker)

    def _read(self, worker: ModelWorker) -> None:
        if worker.is_reading or not worker.queue:
            return
        served = worker.queue.popleft()
        hashes = self._hashes(served.arrival.token_ids)
        num_tokens = len(served.arrival.token_ids)
        served.num_cached = min(worker.match(hashes) * self.shape.block_size, num_tokens - 1)
        seconds = (num_tokens - served.num_cached) / self.shape.prompt_tokens_per_s
        worker.is_reading = True
        worker.busy_s += seconds
        self._after(seconds, lambda: self._finish_reading(worker, served))

    def _finish_reading(self, worker: ModelWorker, served: Served) -> None:
        worker.is_reading = False
        worker.keep(self._hashes(served.arrival.token_ids))
        served.first_s = self.now
        attempt = served.attempt
        assert attempt is not None
        self._placement.on_prefill_done(attempt, served.num_cached, self.now)
        self._placement.release_prefill(attempt)
        self._read(worker)
        if attempt.decode is None:
            self._end(served, None)
        else:
            self._send(self.workers[attempt.decode.identity], served)
        self._place()

    def _send(self, worker: ModelWorker, served: Served) -> None:
        hashes, layout = self._hashes(served.arrival.token_ids), worker.worker.detail.layout
        num_tokens = len(served.arrival.token_ids)
        cached = min(worker.match(hashes) * self.shape.block_size, num_tokens)
        served.num_sent = layout.transfer_bytes(num_tokens, cached)
        seconds = served.num_sent / self.shape.link_bytes_per_s
        worker.link_free_s = max(self.now, worker.link_free_s) + seconds
        self._after(worker.link_free_s - self.now, lambda: self._generate(worker, served, seconds))

    def _generate(self, worker: ModelWorker, served: Served, transfer_s: float) -> None:
        num_blocks = len(served.arrival.token_ids) // self.shape.block_size + 1
        worker.num_running += 1
        worker.used_blocks += num_blocks
        step_s = self.shape.step_s + self.shape.sequence_s * worker.num_running
        seconds = step_s * (len(served.arrival.answer) - 1)
        worker.busy_s += seconds

        def end() -> None:
            worker.num_running -= 1
            worker.used_blocks -= num_blocks
            worker.keep(self._hashes((*served.arrival.token_ids, *served.arrival.answer[:-1])))
            usage = Usage(
                finish_reason="length",
                completion_tokens=len(served.arrival.answer),
                kv_bytes=served.num_sent,
                kv_transfer_seconds=transfer_s,
            )
            self._placement.learn(worker.worker, usage)
            assert served.attempt is not None
            self._placement.release_decode(served.attempt)
            self._end(served, worker)

        self._after(seconds, end)

    def _end(self, served: Served, worker: ModelWorker | None) -> None:
        served.end_s = self.now
        self.served.append(served)
        self._num_open -= 1
        following = served.arrival.on_end(self.now)
        if following is not None:
            self._come(following)
        self._place()

    def _beat(self) -> None:
        shape = self.shape
        for worker in self.workers.values():
            speed = {"step_s": shape.step_s, "sequence_s": shape.sequence_s}
            if worker.worker.role is Role.PREFILL:
                speed = {"token_s": 1 / shape.prompt_tokens_per_s}
            running = worker.num_running + worker.is_reading
            beat, load = Heartbeat(0, running, len(worker.queue)), worker.load(**speed)
            self._fleet.heartbeat(worker.worker.identity, beat, load, self.now)
            self._index.evict(worker.worker.identity, load.evicted)
            self._index.store(worker.worker.identity, load.stored)
        self._fleet.update_costs()
        self._place()
        self._after(BEAT_S, self._beat)

    def _hashes(self, token_ids: tuple[int, ...]) -> list[int]:
        return prefix_hashes(token_ids, self.shape.block_size)

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))


class _Silent:
    """A sink that ignores what it gets."""

    def on_prefill(self, *args: object) -> None: ...
    def on_token(self, *args: object) -> None: ...
    def on_done(self, *args: object) -> None: ...
    def on_error(self, *args: object) -> None: ...
    def on_end(self, *args: object) -> None: ...


_SILENT: Final = _Silent()
