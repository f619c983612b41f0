"""The processes of a world: real routers' cores and real workers, each in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

from router.bus import Bus
from router.core.fleet import MISSED_BEATS, Fleet
from router.core.fleet import Worker as FleetWorker
from router.core.state import Limits, RequestIds
from tests.simulation.loop import Process, new_process
from tests.simulation.network import Network
from tests.simulation.scenario import Scenario
from tests.simulation.sockets import Hub, Link, Plane, Port, fetch
from tests.simulation.threads import EventCopies, EventThread, SlowExecutor
from tests.simulation.workload import MAX_PROMPT, MAX_TOKENS, VOCAB_SIZE
from worker.app import Worker
from worker.config import Config
from worker.environment import Environment
from worker.executor.contract import ModelInfo
from worker.executor.hash import EOS_TOKEN_IDS, LAYOUT

HEARTBEAT_S: Final = 0.4
LEASE_S: Final = 2.0
TICK_S: Final = 0.1
INFO: Final = ModelInfo(
    name="hash",
    fingerprint="simulated",
    vocab_size=VOCAB_SIZE,
    max_model_len=MAX_PROMPT + MAX_TOKENS + 1,
    eos_token_ids=EOS_TOKEN_IDS,
    layout=LAYOUT,
)


def endpoint_of(router: str) -> str:
    return f"tcp://{router}:5570"


class WatchedFleet(Fleet):
    """A router's fleet that may not call a worker silent while it is the router that stands still.

    `heard_at` is when the router read the last message of each peer.
    """

    def __init__(self, process: Process, **settings: Any) -> None:
        super().__init__(**settings)
        self.heard_at: dict[bytes, float] = {}
        self._own = process

    def overdue(self, now: float) -> list[FleetWorker]:
        late = super().overdue(now)
        for worker in late:
            heard = self.heard_at[worker.identity]
            stood = (
                end - max(start, heard)
                for start, end in self._own.stops
                if end > heard and end - start > self.heartbeat_s
            )
            waited_s = now - heard - sum(stood)
            if waited_s < MISSED_BEATS * self.heartbeat_s - 1e-6:  # sums are rounded
                what = f"{worker.name} is lost after {waited_s:.2f} s of listening"
                self._own.problems.append(f"{self._own.name}: {what}")
        return late


class RouterProcess:
    """The bus and all behind it, as `router.app` puts them together, without HTTP and raw TCP."""

    def __init__(self, name: str, epoch: int, network: Network, scenario: Scenario) -> None:
        self.name = name
        self.process = new_process(network.timeline, name)
        self.fleet = WatchedFleet(
            self.process,
            model_fingerprint=INFO.fingerprint,
            max_kv_transfer_bytes=1 << 30,
            heartbeat_s=HEARTBEAT_S,
        )
        self.hub = Hub(network, self.process, self._on_message, self._on_lost)
        self.bus = Bus(
            self.fleet,
            transmit=self.hub.send,
            forget=self.hub.forget,
            limits=Limits(
                max_waiting=scenario.max_waiting,
                max_running_per_worker=scenario.max_running,
                queue_timeout_s=4.0,
                lease_s=LEASE_S,
                deadline_s=scenario.deadline_s,
                local_prefill=scenario.local_prefill,
            ),
            lease_ms=round(LEASE_S * 1000),
            request_ids=RequestIds(epoch, key=b"the same each time"),
            clock=self.process.time,
        )
        self.hub.bind(endpoint_of(name))
        network.timeline.after(0.0, self.process, self._tick)

    def _on_message(self, peer: bytes, parts: list[Any]) -> None:
        self.fleet.heard_at[peer] = self.process.time()
        self.bus.on_message(peer, parts)

    def _on_lost(self, peer: bytes) -> None:
        self.bus.on_lost(peer)

    def _tick(self) -> None:
        self.bus.tick()
        self.process.call_later(TICK_S, self._tick)


@cache
def _config(name: str, routers: tuple[str, ...]) -> Config:
    role, _, rank = name.partition("-")
    return Config(
        role=role,  # type: ignore[arg-type]
        rank=int(rank),
        router=routers,
        executor="hash",
        kv_segment_port="off",  # its thread sleeps on a socket, which this network has none of
    )


class WorkerProcess:
    """One worker; `worker` is there once it has booted, `status` once it has ended."""

    worker: Worker
    thread: EventThread
    task: asyncio.Task[int]

    def __init__(
        self,
        name: str,
        epoch: int,
        network: Network,
        scenario: Scenario,
        on_exit: Callable[[WorkerProcess], None],
    ) -> None:
        self.name, self.epoch = name, epoch
        # Of two processes of one rank the network must know which is which.
        self.process = new_process(network.timeline, name)
        self.status: int | None = None
        self.is_booted = False
        self._network, self._scenario, self._on_exit = network, scenario, on_exit
        network.timeline.after(0.0, self.process, self._boot)

    def drain(self) -> None:
        self._stop.set()

    def _boot(self) -> None:
        routers = tuple(map(endpoint_of, self._scenario.routers))
        config = _config(self.name, routers).model_copy(update=self._scenario.settings)
        info = replace(INFO, layout=self._scenario.layout)
        is_late = self._scenario.is_late and config.role != "prefill"
        self.executor = SlowExecutor(info, is_late=is_late)
        self._stop = asyncio.Event()
        self.config = config
        self.worker = Worker(config, self.executor, self._environment())
        self.task = self.process.create_task(self.worker.run(self._stop))
        self.task.add_done_callback(self._exited)
        self.is_booted = True

    def _environment(self) -> Environment:
        network, process, scenario = self._network, self.process, self._scenario
        timeline, random = network.timeline, network.random
        return Environment(
            clock=process.time,
            epoch=lambda: self.epoch,
            connect=partial(Link, network, process),
            make_plane=lambda *_: Plane(network, process),
            make_thread=self._make_thread,
            make_copies=lambda *_: EventCopies(
                timeline, process, random, scenario.copy_s, self.executor, self._is_used
            ),
            make_port=partial(Port, network, process),
            fetch=partial(fetch, network, process),
        )

    def _is_used(self, block: int) -> bool:
        return self.thread.engine.pool.is_used(block)

    def _make_thread(self, *args: Any) -> EventThread:
        network, scenario = self._network, self._scenario
        reads = self.config.role == "prefill" and scenario.reading_s
        step_s = reads or scenario.step_s
        self.thread = EventThread(network.timeline, self.process, network.random, step_s, *args)
        return self.thread

    def _exited(self, task: asyncio.Task[int]) -> None:
        if not task.cancelled():
            self.status = task.result()
            self._on_exit(self)
