"""One seed, from the first event to rest: cluster, faults, clients, and the checks between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from msgspec import structs
from xxhash import xxh3_64

from router.core.request import Request
from tests.simulation import invariants
from tests.simulation.cluster import RouterProcess, WorkerProcess
from tests.simulation.loop import Process, State, Timeline
from tests.simulation.network import Mischief, Network
from tests.simulation.scenario import CALM_S, Fault, FaultKind, Scenario, draw
from tests.simulation.workload import PROMPTS, VARIANTS, Client, Job
from wire.errors import WireError
from wire.frames import Tag
from wire.parts import Buffer

# After the last request ended: leases, back-offs and a router that says nothing take so long.
REST_S: Final = 20.0
LOOK_S: Final = 0.25
MAX_EVENTS: Final = 200_000


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    """A cluster under test.  `run` returns when all is at rest, or raises `Violation`."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        random = Random(seed)
        self.scenario: Scenario = draw(random, seed)
        self.timeline = Timeline()
        self.random = random
        self.trace: deque[str] = deque(maxlen=None if keep_trace else 1)
        self.violations: list[str] = []
        self.orphans: dict[str, float] = {}  # since when
        self.clients: list[Client] = []
        self.handles: dict[Client, tuple[RouterProcess, int]] = {}
        self._digest = xxh3_64()
        self._epochs = 0
        self.network = Network(
            self.timeline,
            random,
            latency_s=self.scenario.latency_s,
            queue_bytes=self.scenario.queue_bytes,
            note=self._on_writer,
            mischief=Mischief(
                random, self.scenario.twice, self.scenario.swapped, self.scenario.corrupt
            ),
        )
        self.routers: dict[str, RouterProcess] = {}
        self.workers: dict[str, WorkerProcess] = {}
        self.elders: list[WorkerProcess] = []  # processes whose rank another one has taken
        for name in self.scenario.routers:
            self.start_router(name)
        for name in self.scenario.workers:
            self.start_worker(name)
        for job in self.scenario.jobs:
            self.timeline.at(job.at_s, None, self._submit, job)
        self.faults = Faults(self)

    @property
    def digest(self) -> str:
        """Of everything that happened, in order."""
        return self._digest.hexdigest()

    def run(self) -> None:
        try:
            self._run_until(CALM_S, lambda: False)
            self.note("calm")
            self.faults.heal()
            ended_s = CALM_S + self.scenario.deadline_s + 1.0
            self._run_until(ended_s, lambda: all(c.end for c in self.clients))
            self._run_until(self.timeline.now + REST_S, lambda: not invariants.left_over(self))
            if problems := invariants.left_over(self) or invariants.unserved(self):
                raise Violation("at rest: " + "; ".join(problems))
        finally:
            self.close()

    def _run_until(self, when: float, is_enough: Callable[[], bool]) -> None:
        while self.timeline.now < when:
            look_s = self.timeline.now + LOOK_S
            while self.timeline.next_s <= look_s:
                process = self.timeline.step()
                if process is not None:
                    invariants.check(self, process)
                if self.violations:
                    raise Violation(self.violations[0])
                if self.timeline.num_events > MAX_EVENTS:
                    raise Violation(f"{MAX_EVENTS} events, and no end")
            self.timeline.now = look_s
            invariants.check_deadlines(self)
            invariants.check_orphans(self)
            if self.violations:
                raise Violation(self.violations[0])
            if is_enough():
                return

    def close(self) -> None:
        """End every process, so that nothing of this world stays in memory."""
        for process in self.processes:
            if process.state is not State.DEAD:
                process.kill()

    # What happens, for the trace and for the digest.

    def note(self, what: str) -> None:
        line = f"{self.timeline.now:.6f} {what}"
        self._digest.update(line.encode())
        self.trace.append(line)

    def violate(self, what: str) -> None:
        self.note(f"VIOLATION {what}")
        self.violations.append(what)

    def _on_writer(self, source: str, target: str, parts: Sequence[Buffer]) -> None:
        tag = int.from_bytes(parts[0], "little")
        self.note(f"{source} > {target} {Tag(tag).name} {bytes(parts[1]).hex()}")

    # Processes.

    @property
    def processes(self) -> list[Process]:
        routers = [router.process for router in self.routers.values()]
        workers = [*self.workers.values(), *self.elders]
        return routers + [worker.process for worker in workers]

    def next_epoch(self) -> int:
        self._epochs += 1
        return self._epochs

    def start_router(self, name: str) -> None:
        self.routers[name] = RouterProcess(name, self.next_epoch(), self.network, self.scenario)

    def start_worker(self, name: str) -> None:
        self.workers[name] = WorkerProcess(
            name, self.next_epoch(), self.network, self.scenario, self._on_exit
        )

    def kill(self, one: RouterProcess | WorkerProcess) -> None:
        one.process.kill()
        self.network.lose(one.process)
        if isinstance(one, RouterProcess):
            for client in self.clients:
                if client.end is None and one.name == f"router-{client.job.router}":
                    client.finish("router lost")

    def _on_exit(self, one: WorkerProcess) -> None:
        """A worker ended by itself: by a drain, refused, or broken."""
        self.note(f"{one.name} exits with {one.status}")
        invariants.check_exit(self, one)
        self.timeline.after(0.2, None, self._bury, one)

    def _bury(self, one: WorkerProcess) -> None:
        if one.process.state is not State.DEAD:
            self.kill(one)
        if one in self.elders:
            self.elders.remove(one)
        elif self.workers[one.name] is one:
            elder = next((elder for elder in self.elders if elder.name == one.name), None)
            if elder is None:
                self.start_worker(one.name)
            else:  # It was alive after all and kept its rank.
                self.elders.remove(elder)
                self.workers[one.name] = elder

    # Clients.

    def _submit(self, job: Job) -> None:
        router = self.routers[f"router-{job.router}"]
        client = Client(job, self.violate)
        self.clients.append(client)
        if router.process.state is State.DEAD:
            client.finish("router lost")
        else:
            self.timeline.after(0.0, router.process, self._send, router, client)

    def _send(self, router: RouterProcess, client: Client) -> None:
        job, now, longest_s = client.job, self.timeline.now, self.scenario.deadline_s
        client.deadline = now + min(job.deadline_s or longest_s, longest_s)
        options = structs.replace(
            VARIANTS[job.variant],
            max_tokens=job.max_tokens if job.decode_after_s is None else None,
            priority=job.priority,
            deadline_ms=None if job.deadline_s is None else round(job.deadline_s * 1000) or 1,
        )
        self.note(f"request {job.name}: {len(PROMPTS[job.prompt])} + {job.max_tokens} tokens")
        new_tokens = job.max_tokens - 1 if job.decode_after_s is None else None
        request = Request(PROMPTS[job.prompt], options, new_tokens, f"client {job.name}")
        try:
            handle = router.bus.dispatcher.submit(request, client)
        except WireError as error:
            client.finish(f"refused: {error.code.label}")
            return
        self.handles[client] = router, handle
        if job.cancel_after_s is not None:
            self.timeline.at(now + job.cancel_after_s, router.process, self._cancel, client)
        if job.decode_after_s is not None:
            self.timeline.at(now + job.decode_after_s, router.process, self._decode, client)

    def _cancel(self, client: Client) -> None:
        if client.end is None:
            router, handle = self.handles[client]
            client.finish("cancelled")
            self.note(f"request {client.job.name}: cancel")
            router.bus.dispatcher.cancel(handle)

    def _decode(self, client: Client) -> None:
        if client.end is None:
            router, handle = self.handles[client]
            router.bus.dispatcher.decode(handle, client.job.max_tokens - 1)


class Faults:
    """Plans every fault; `heal` is the end of all that has not ended by itself."""

    def __init__(self, world: World) -> None:
        self._world = world
        for fault in world.scenario.faults:
            world.timeline.at(fault.at_s, None, self._happen, fault)

    def heal(self) -> None:
        world = self._world
        for one in [*world.workers.values(), *world.elders]:
            one.process.go_on()
            if one.is_booted:
                one.thread.slowness = 1.0
        world.network.heal()
        for name in world.scenario.routers:
            world.routers[name].process.go_on()
            self._revive_router(name)
        for name in world.scenario.workers:
            self._revive_worker(name)

    def _happen(self, fault: Fault) -> None:
        world, target, kind = self._world, fault.target, fault.kind
        world.note(f"{kind} {target} ({fault.other}) for {fault.duration_s:.3f} s")
        if kind is FaultKind.KILL_ROUTER:
            if world.routers[target].process.state is not State.DEAD:
                world.kill(world.routers[target])
            self._later(fault, self._revive_router, target)
        elif kind is FaultKind.STOP_ROUTER:
            process = world.routers[target].process
            process.stop_running()
            self._later(fault, process.go_on)
        elif kind is FaultKind.CUT:
            world.network.cut(target)
        elif kind is FaultKind.CUT_BETWEEN:
            world.network.cut(target, fault.other)
        elif kind in (FaultKind.ONE_WAY, FaultKind.PARTITION):
            world.network.block(target, fault.other)
            if kind is FaultKind.PARTITION:
                world.network.block(fault.other, target)
            self._later(fault, world.network.heal)
        else:
            self._to_worker(fault)

    def _to_worker(self, fault: Fault) -> None:
        world, target = self._world, fault.target
        one = world.workers[target]
        if one.process.state is not State.RUNNING or not one.is_booted:
            return
        if fault.kind is FaultKind.KILL:
            world.kill(one)
            self._later(fault, self._revive_worker, target)
        elif fault.kind is FaultKind.DRAIN:
            world.timeline.after(0.0, one.process, one.drain)
        elif fault.kind is FaultKind.SLOW:
            one.thread.slowness = 20.0
            self._later(fault, self._hurry, target)
        else:
            one.process.stop_running()
            if fault.kind is FaultKind.REPLACE:
                world.elders.append(one)
                world.start_worker(target)
            self._later(fault, one.process.go_on)

    def _later(self, fault: Fault, call: object, *args: object) -> None:
        assert callable(call)
        self._world.timeline.after(fault.duration_s, None, call, *args)

    def _hurry(self, name: str) -> None:
        if self._world.workers[name].is_booted:
            self._world.workers[name].thread.slowness = 1.0

    def _revive_worker(self, name: str) -> None:
        if self._world.workers[name].process.state is State.DEAD:
            self._world.start_worker(name)

    def _revive_router(self, name: str) -> None:
        if self._world.routers[name].process.state is State.DEAD:
            self._world.start_router(name)
