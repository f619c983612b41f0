"""The design's invariants: those after every event, and those at rest.

The stream of each client is checked where it is heard (`workload.Client`), every block after every
step where it is computed (`threads.EventThread`); here are the books of routers and workers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.cluster import RouterProcess, WorkerProcess, endpoint_of
from tests.simulation.loop import Process, State
from wire.process.settings import EX_TEMPFAIL
from worker.link import LinkState
from worker.roles.decode import DecodeRole
from worker.roles.prefill import PrefillRole

if TYPE_CHECKING:
    from tests.simulation.world import World

# How late a router may notice that a deadline has passed: a tick, and the rounding to ms.
SLACK_S: Final = 0.3
# How long what was cancelled may go on: a message, a copy and a step, with room to spare.
CANCEL_S: Final = 1.0
# The tasks of a worker that has nothing to do; run, beat, tick, and what `run` waits with.
RESTING_TASKS: Final = frozenset({"Worker.run", "Worker._watched", "Event.wait"})


def check(world: World, process: Process) -> None:
    """After every event, where it happened."""
    if process.problems:
        world.violate(process.problems[0])
    one = world.workers.get(process.name)
    if one is not None and one.process is process and one.is_booted:
        role = one.worker.role
        if isinstance(role, DecodeRole):
            try:
                role.incoming.check()
            except AssertionError as error:
                world.violate(f"{one.name}: {error}")


def check_deadlines(world: World) -> None:
    """Now and then: every request ends in time; what is promised is somebody's."""
    for client in world.clients:
        process = world.routers[f"router-{client.job.router}"].process
        woke_s = process.stops[-1][1] if process.stops else 0.0
        late_s = world.timeline.now - max(client.deadline, woke_s)
        if client.end is None and process.state is not State.STOPPED and late_s > SLACK_S:
            world.violate(f"request {client.job.name} is {late_s:.2f} s late")
    for router in world.routers.values():
        for worker in router.fleet:
            if worker.promised_blocks != sum(worker.promised.values()) or worker.num_active < 0:
                world.violate(f"{router.name}: the books of {worker.name} are wrong")


def check_orphans(world: World) -> None:
    """Now and then: what no router asks for is gone within `CANCEL_S`, and a drain is echoed."""
    if not world.scenario.is_in_touch:
        return
    living = [r for r in world.routers.values() if r.process.state is State.RUNNING]
    orphans: dict[str, float] = {}
    for one in world.workers.values():
        if one.process.state is State.RUNNING and one.is_booted:
            here = one.worker.role.request_ids | one.thread.engine.request_ids
            ended = {
                f"{request_id:x}, which has ended"
                for request_id in here
                if not any(request_id in router.bus.dispatcher.attempts for router in living)
            }
            for what in sorted(ended | _waits_for_echo(world, one)):
                key = f"{one.name} of epoch {one.epoch} still works on {what}"
                since = orphans[key] = world.orphans.get(key, world.timeline.now)
                if world.timeline.now - since > CANCEL_S:
                    world.violate(key)
    world.orphans = orphans


def _waits_for_echo(world: World, one: WorkerProcess) -> set[str]:
    """Routers that have nothing on a draining worker and do not say so."""
    silent = set()
    for link in one.worker.routers:
        if link.drain_s is None or link.is_drained:
            continue
        router = next(r for r in world.routers.values() if endpoint_of(r.name) == link.endpoint)
        known = router.fleet.get(link.identity.name)
        if known is not None and not known.attempts and router.process.state is State.RUNNING:
            silent.add(f"a drain that {router.name} does not echo")
    return silent


def check_exit(world: World, one: WorkerProcess) -> None:
    """A worker left: because it is drained, or because another one had its rank."""
    is_rivalled = one.name in {elder.name for elder in world.elders}
    if one.status != 0 and not (one.status == EX_TEMPFAIL and is_rivalled):
        world.violate(f"{one.name} exits with {one.status}")


def unserved(world: World) -> list[str]:
    """The requests without an answer although nothing went wrong."""
    if not world.scenario.is_calm:
        return []
    fair = {"done", "cancelled", "overloaded", "refused: overloaded"}
    return [
        f"request {client.job.name}: {client.end} although nothing went wrong"
        for client in world.clients
        if client.end not in fair
        and (client.job.deadline_s is None or client.end != "deadline_exceeded")
    ]


def left_over(world: World) -> list[str]:
    """The resources that are held although every request has ended."""
    left = [
        f"{one.name} with the old epoch {one.epoch} lives, and no router has it"
        for one in world.elders
        if not any(r.fleet.get(one.worker.routers[0].identity.name) for r in world.routers.values())
    ]
    for router in world.routers.values():
        left += _left_at_router(router, world.scenario.workers)
    for worker in world.workers.values():
        if worker.process.state is not State.RUNNING or not worker.is_booted:
            left.append(f"{worker.name} is not there")
        else:
            rivals = [elder for elder in world.elders if elder.name == worker.name]
            left += [f"{worker.name}: {thing}" for thing in _left_at_worker(worker, bool(rivals))]
    return left


def _left_at_router(router: RouterProcess, names: list[str]) -> list[str]:
    dispatcher = router.bus.dispatcher
    left = []
    if dispatcher.num_running or dispatcher.num_waiting:
        left.append(f"{router.name}: {dispatcher.num_running} + {dispatcher.num_waiting} requests")
    if dispatcher.dropped["protocol"]:
        left.append(f"{router.name}: {dispatcher.dropped['protocol']} frames broke the protocol")
    ready = {worker.name for worker in router.fleet if worker.is_ready}
    left += [f"{router.name}: {name} is not ready" for name in names if name not in ready]
    for worker in router.fleet:
        if worker.is_ready and (
            worker.attempts
            or worker.num_active
            or worker.prefill_tokens
            or worker.promised
            or worker.promised_blocks
        ):
            left.append(
                f"{router.name}: {worker.name} has {len(worker.attempts)} attempts, "
                f"{worker.num_active} active, {worker.promised_blocks} blocks promised"
            )
    return left


def _name(task: asyncio.Task[Any]) -> str:
    return str(getattr(task.get_coro(), "__qualname__", task))


def _left_at_worker(one: WorkerProcess, has_rival: bool) -> list[str]:
    """Return what a worker still holds; one with a rival alive may stand by where that one is."""
    worker = one.worker
    engine, role = one.thread.engine, worker.role
    things = {
        "used blocks": engine.load().used,
        "sequences": len(engine.request_ids),
        "swapped out": len(engine.swap),
        "unfinished requests": role.num_unfinished,
        "KV bytes in flight": role.kv_inflight_bytes,
        "busy": int(one.thread.is_busy),
        "links not ready": sum(
            link.state is not LinkState.READY and not (has_rival and link.is_fenced)
            for link in worker.routers
        ),
        "tasks": sum(_name(task) not in RESTING_TASKS for task in one.process.tasks),
    }
    prefill = role if isinstance(role, PrefillRole) else role.prefill
    things["transfers"] = prefill.peers.num_transfers
    if isinstance(role, DecodeRole):
        things["incoming transfers"] = len(role.incoming)
        things["waiting offers"] = len(role.incoming.budget)
        free_bytes = role.incoming.budget.free_bytes
        things["missing budget"] = one.config.max_kv_inflight_bytes - free_bytes
    return [f"{count} {what}" for what, count in things.items() if count]
