"""Lets the faults of a scenario happen in a world, and ends them all when it is time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.loop import State
from tests.simulation.scenario import Fault, FaultKind

if TYPE_CHECKING:
    from tests.simulation.world import World


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
