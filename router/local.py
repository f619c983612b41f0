"""`--local`: runs workers on this machine as child processes.

A worker that dies is restarted with backoff.  A worker that exits because of wrong settings (exit
status 78) is not restarted, unless it ran before: then files of the model may be broken, and may be
repaired.  If no local worker is left to restart and there are no other workers, the router exits
too.  A worker whose rank is taken (exit status 75) is restarted when the rank is free, and one that
was asked to leave (exit status 80) is not.  On shutdown
workers get SIGTERM, later SIGKILL; if the router is killed, Linux kills them (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from router.config import Config
from router.core.cluster import ProcessState
from router.cores import plan
from wire.process.children import MIN_PAUSE_S, lives, signal_child, start_child
from wire.process.cores import format_cores, nodes, own_cores, physical_cores, quota
from wire.process.settings import EX_CONFIG, EX_LEFT, EX_TEMPFAIL, ConfigError, SharedSettings

log = structlog.get_logger("router")


@dataclass(eq=False, repr=False)
class LocalWorkers:
    """Runs the child processes of one router, whose bus is bound to `bus`.

    `is_free(role, rank)` returns whether no worker has this rank now.
    """

    config: Config
    bus: str
    is_free: Callable[[str, int], bool]
    min_pause_s: float = MIN_PAUSE_S
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _processes: dict[tuple[str, int], asyncio.subprocess.Process] = field(default_factory=dict)
    # Workers that once ran and did not exit because of wrong settings.
    _have_run: set[tuple[str, int]] = field(default_factory=set)
    _is_stopping: bool = False

    def __post_init__(self) -> None:
        self._cores = cores_of_workers(self.config)

    @property
    def pids(self) -> dict[tuple[str, int], int]:
        """The process ids of the running workers, by role and rank."""
        return {key: process.pid for key, process in self._processes.items()}

    def start(self) -> None:
        """Start all workers, and restart them until `stop` is called."""
        for role, rank in self.config.local_workers:
            self._tasks.append(asyncio.create_task(self._keep_running(role, rank)))

    async def stop(self, drain_s: float) -> None:
        """Terminate all workers, kill those left after `drain_s`, and wait for their exit."""
        self._is_stopping = True
        for process in self._processes.values():
            signal_child(process, signal.SIGTERM)
        waits = [asyncio.create_task(process.wait()) for process in self._processes.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=drain_s)
            if late:
                log.warning("local workers killed", count=len(late))
            for process in self._processes.values():
                signal_child(process, signal.SIGKILL)
            await asyncio.wait(waits)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self, states: Sequence[ProcessState]) -> None:
        """Check that any worker is left to wait for.  Call this regularly.

        Raises:
            ConfigError: No local worker will be restarted, and no other worker has ever joined.
        """
        # A worker that has left ran before; one that is given up did not.
        all_done = all(task.done() for task in self._tasks)
        are_given_up = bool(self._tasks) and all_done and not self._have_run
        if are_given_up and not self._is_stopping and not any(state.workers for state in states):
            raise ConfigError(
                "--local: none of these workers can start; what is wrong they say above, and it "
                "comes from --worker-args, a flag of this router or the environment"
            )

    async def _keep_running(self, role: str, rank: int) -> None:
        """Run a worker and restart it until `stop`, or until its settings are wrong."""
        name = f"{role}-{rank}"
        run = partial(self._run, role, rank)
        async for status in lives(run, log.bind(worker=name), self.min_pause_s):
            if self._is_stopping:
                return
            if status == EX_LEFT:
                log.info("local worker has left, as it was asked to", worker=name)
                return
            if status == EX_CONFIG and (role, rank) not in self._have_run:
                log.error("local worker has wrong settings, given up", worker=name)
                return
            if status == EX_CONFIG:
                log.error(
                    "local worker cannot start, though it ran before: are its model's files whole? "
                    "It says above what is wrong, and is tried again",
                    worker=name,
                )
            if status == EX_TEMPFAIL:
                await self._wait_for_rank(role, rank)

    async def _wait_for_rank(self, role: str, rank: int) -> None:
        name = f"{role}-{rank}"
        log.error("another worker has this rank; ours waits until it is free", worker=name)
        while not self.is_free(role, rank):  # noqa: ASYNC110 - the fleet has no events
            await asyncio.sleep(self.min_pause_s)
        log.info("the rank is free again", worker=name)

    async def _run(self, role: str, rank: int) -> int:
        environ = environment(os.environ, self._cores.get((role, rank), frozenset()))
        process = await start_child(command(self.config, self.bus, role, rank), environ)
        self._processes[role, rank] = process
        log.info("local worker started", worker=f"{role}-{rank}", pid=process.pid)
        if self._is_stopping:  # `stop` has signalled the other workers already.
            signal_child(process, signal.SIGKILL)
        try:
            status = await process.wait()
        finally:
            self._processes.pop((role, rank), None)
        if status != EX_CONFIG:
            self._have_run.add((role, rank))
        return status


def command(config: Config, bus: str, role: str, rank: int) -> list[str]:
    """Return the command line of a local worker.  `worker_args` come last and take precedence."""
    shared = config.model_dump(include={*SharedSettings.model_fields}, exclude_none=True)
    shared["memory_share"] = config.memory_share / sum(config.local)  # the workers share one GPU
    settings = {"role": role, "rank": rank, "router": bus, **shared}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "worker", *flags, *shlex.split(config.worker_args)]


def cores_of_workers(config: Config) -> dict[tuple[str, int], frozenset[int]]:
    """Return the cores of each local worker, except those that may use all cores of the router."""
    cores = own_cores()
    by_node = [physical_cores(node) for node in nodes(cores)]
    # Under a CPU quota, the scheduler chooses the cores.
    has_quota = quota() < sum(map(len, by_node))
    sharing = "shared" if has_quota else config.local_cores
    planned = plan(by_node, config.local_workers, sharing)
    return {worker: assigned for worker, assigned in planned.items() if assigned != cores}


def environment(
    inherited: os._Environ[str] | dict[str, str], cores: frozenset[int] = frozenset()
) -> dict[str, str]:
    """Return the environment for a worker: the router's, without the variables of its settings.

    The cores are set by a variable and not by a flag, so that a flag or variable of the user takes
    precedence.
    """
    dropped = {f"BATON_{name.upper()}" for name in Config.model_fields}
    kept = {name: value for name, value in inherited.items() if name.upper() not in dropped}
    if cores:
        kept.setdefault("BATON_CORES", format_cores(cores))
    return kept
