"""`--processes N`: the parent of router processes that share one port.

The parent reserves the addresses, runs the local workers, notifies systemd, and relays requests
between processes.  Each process is a complete router with its own bus, which all workers join.
Linux distributes the connections over the processes (SO_REUSEPORT).

    start   the first process starts alone, so that errors are logged only once, then the others
    death   the other processes continue; a new process gets the bus of the dead one, and accepts
            clients once workers have joined it
    stuck   a process that does not reply for `STUCK_S`, or does not serve clients `START_S` after
            its start, is killed, after its stacks are logged
    stop    all processes drain, then the local workers are stopped, then the processes
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, Final

import structlog

from router.app import REPORT_S, announce, named, split_address
from router.config import Config
from router.core.cluster import ProcessState, Readiness, is_free, reasons_of, status_line
from router.http.server import FLUSH_S
from router.local import LocalWorkers
from router.processes.channel import (
    Answers,
    AskAll,
    AskAssignment,
    AskMetrics,
    AskState,
    Assignment,
    Channel,
    Drained,
    Listening,
    Question,
)
from router.processes.merged_metrics import Families, summed, without_gauges
from router.processes.siblings import VARIABLE
from wire.aio.listener import reserve
from wire.process.children import MIN_PAUSE_S, lives, signal_child, start_child
from wire.process.lifetime import keep_watchdog, notify

log = structlog.get_logger("router")

# The timeout of a request to a process.
ANSWER_S: Final = 1.0
# The timeout when polling its state: load balancers mostly time out after a second.
STATE_S: Final = 0.5
NO_REPLY: Final = object()
# These two are as in the systemd unit.
STUCK_S: Final = 15.0
START_S: Final = 90.0
# Environment variables of systemd, which processes must not inherit.
PARENT_ONLY: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Process:
    """One router process, and its replacements when it dies."""

    def __init__(self, index: int, bus: str) -> None:
        self.index = index
        self.bus = bus
        self.channel: Channel | None = None
        self.child: asyncio.subprocess.Process | None = None
        self.is_listening = self.has_listened = False
        self.drained = asyncio.Event()
        self.replied_at = 0.0
        self.is_aborted = False
        self.state: ProcessState | None = None
        self.metrics: Families = []

    def signal(self, number: int) -> None:
        if self.child is not None:
            signal_child(self.child, number)

    def forget(self) -> Families:
        """Reset the state after the process has ended, and return its counters."""
        self.channel = self.child = self.state = None
        self.is_listening = self.is_aborted = False
        self.drained.set()
        counters, self.metrics = without_gauges(self.metrics), []
        return counters


class Processes:
    """Runs all router processes and the local workers.  Raises OSError if an address is in use."""

    def __init__(self, config: Config, argv: Sequence[str]) -> None:
        self._config = config
        self._argv = argv
        self._reserved: list[socket.socket] = []
        for flag, endpoint in (("--http", config.http), ("--tcp", config.tcp)):
            with named(flag, endpoint):
                self._reserved.append(reserve(*split_address(endpoint), self._reserved))
        self._all = [Process(index, config.bus_of(index)) for index in range(config.processes)]
        self._tasks: list[asyncio.Task[Any]] = []
        self._local: LocalWorkers | None = None
        self._first_listens, self._all_listen = asyncio.Event(), asyncio.Event()
        self._may_end = asyncio.Event()
        self._is_stopping = False
        self._endpoints: dict[str, str] = {}
        self._try_this = ""
        self._polled_at = inf
        self._ended_counters: Families = []

    async def serve(self, stop: asyncio.Event) -> int:
        """Run until `stop` is set; return the exit status."""
        try:
            return await self._serve(stop)
        except asyncio.CancelledError:  # a second signal was received: forward it
            await self._force_end()
            raise

    async def _serve(self, stop: asyncio.Event) -> int:
        loops = [self._start(self._keep_running(process)) for process in self._all]
        stopped, monitor = self._start(stop.wait()), self._start(self._monitor())
        # Before a stop, a loop ends only if its process never served clients: settings are wrong.
        await asyncio.wait([stopped, monitor, *loops], return_when=asyncio.FIRST_COMPLETED)
        if monitor.done():
            monitor.result()  # raises, because it ends only with an error
        monitor.cancel()
        failed = [max(each.result(), 0) or 1 for each in loops if each.done()]
        await self._stop(self._config.drain_s if stopped.done() else 0.0)
        return failed[0] if failed else 0

    async def close(self) -> None:
        """Kill the remaining processes and free the addresses."""
        self._is_stopping = True
        for process in self._all:
            process.signal(signal.SIGKILL)
        await _until_ended(self._all)
        if self._local is not None:
            await self._local.stop(0.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reserved in self._reserved:
            reserved.close()

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def _monitor(self) -> None:
        """Wait until all processes serve clients, start the local workers, and monitor both."""
        while not self._all_listen.is_set():
            await self._poll()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_listen.wait(), REPORT_S)
        buses = ",".join(process.bus for process in self._all)
        self._endpoints["bus"] = buses
        self._local = LocalWorkers(
            self._config, buses, lambda role, rank: is_free(self._states(), role, rank)
        )
        self._local.start()
        announce(self._config, self._endpoints)
        notify("READY=1")
        readiness, loop = Readiness(self._try_this), asyncio.get_running_loop()
        while True:
            await self._poll()
            states = self._states()
            notify(f"STATUS={status_line(states)}")
            readiness.on_look(reasons_of(states), loop.time())
            self._local.check(states)
            await asyncio.sleep(REPORT_S)

    async def _stop(self, drain_s: float) -> None:
        """Drain all processes, then stop the local workers, then let the processes end."""
        self._is_stopping = True
        for process in self._all:
            process.signal(signal.SIGTERM if process.is_listening else signal.SIGKILL)
        here = [process for process in self._all if process.is_listening]
        waits = [asyncio.create_task(process.drained.wait()) for process in here]
        if waits:
            await asyncio.wait(waits, timeout=drain_s + 2 * FLUSH_S + ANSWER_S)
        if self._local is not None:
            await self._local.stop(self._config.drain_s)
        self._may_end.set()
        await _until_ended(here, FLUSH_S + ANSWER_S)

    async def _force_end(self) -> None:
        """Force the processes to end, by a second signal."""
        self._may_end.set()
        # Two different signals, since two equal ones may be delivered as one.
        numbers = (signal.SIGINT,) if self._is_stopping else (signal.SIGTERM, signal.SIGINT)
        self._is_stopping = True
        for process in self._all:
            for number in numbers:
                process.signal(number)
        await _until_ended(self._all, FLUSH_S / 2)

    def _states(self) -> list[ProcessState]:
        return [process.state for process in self._all if process.state is not None]

    async def _keep_running(self, process: Process) -> int:
        """Restart a process whenever it dies; return its exit status if it never served clients."""
        run = partial(self._run, process)
        async for status in lives(run, log.bind(process=process.index), MIN_PAUSE_S):
            self._ended_counters = summed([self._ended_counters, process.forget()])
            if self._is_stopping or not process.has_listened:
                return status
        raise AssertionError("there is always a next life")

    async def _run(self, process: Process) -> int:
        """Run a process until it ends and return its exit status."""
        if self._is_stopping:  # `_stop` was called during the backoff before this start
            return 0
        ours, theirs = socket.socketpair()
        process.channel = channel = Channel(ours, lambda asked: self._answer(process, asked))
        environ = {name: it for name, it in os.environ.items() if name not in PARENT_ONLY}
        try:
            with theirs:
                process.child = child = await start_child(
                    [sys.executable, "-m", "router", *self._argv],
                    environ | {VARIABLE: str(theirs.fileno())},
                    [theirs.fileno()],
                )
            process.replied_at = asyncio.get_running_loop().time()
            log.info("router process started", process=process.index, pid=child.pid)
            if self._is_stopping:  # `_stop` has signalled the other processes already
                process.signal(signal.SIGKILL)
            process.drained.clear()
            await channel.open()
            return await child.wait()
        finally:
            await channel.close()

    async def _poll(self) -> None:
        """Poll the states of all processes, and kill those that have not replied for too long.

        A long gap between two polls means that this process or the machine was paused, so the gap
        is not counted.
        """
        here = [process for process in self._all if process.child is not None]
        states = await self._ask(AskState(), here)
        now = asyncio.get_running_loop().time()
        pause_s, self._polled_at = now - self._polled_at, now
        for process, state in zip(here, states, strict=True):
            if state is not NO_REPLY:
                process.replied_at = now
            elif pause_s > 2 * (REPORT_S + STATE_S):
                process.replied_at = min(now, process.replied_at + pause_s)
            allowed_s = STUCK_S if process.is_listening else START_S
            if (silent_s := now - process.replied_at) > allowed_s:
                log.error("router process is stuck", process=process.index, for_s=round(silent_s))
                # First send SIGABRT, which logs the stacks of its threads.
                process.signal(signal.SIGKILL if process.is_aborted else signal.SIGABRT)
                process.is_aborted = True

    async def _answer(self, process: Process, question: object) -> object:
        """Compute the reply to a request of a process."""
        match question:
            case AskAssignment():
                if process.index:
                    await self._first_listens.wait()
                process.replied_at = asyncio.get_running_loop().time()
                return self._assignment(process)
            case Listening(endpoints, try_this):
                self._on_listening(process, endpoints, try_this)
            case Drained():
                process.drained.set()
                if self._is_stopping:  # otherwise only this process drains, and is restarted
                    await self._may_end.wait()
            case AskAll(AskMetrics()):
                await self._ask(AskMetrics(), self._all)
                every = [self._ended_counters, *(each.metrics for each in self._all)]
                return Answers(every, is_complete=True)
            case AskAll(asked):
                listening = [each for each in self._all if each.is_listening]
                answers = await self._ask(asked, listening)
                given = [each for each in answers if each is not NO_REPLY]
                return Answers(given, is_complete=len(given) == len(answers))
        return True

    def _assignment(self, process: Process) -> Assignment:
        addresses = [reserved.getsockname() for reserved in self._reserved]
        asked = (self._config.http, self._config.tcp)
        http, tcp = (
            f"{each.rpartition(':')[0]}:{address[1]}"
            for each, address in zip(asked, addresses, strict=True)
        )
        again = process.has_listened
        return Assignment(process.index, len(self._all), http, tcp, process.bus, again)

    def _on_listening(self, process: Process, endpoints: dict[str, str], try_this: str) -> None:
        process.is_listening = process.has_listened = True
        process.replied_at = asyncio.get_running_loop().time()
        process.bus = endpoints["bus"]
        self._endpoints, self._try_this = endpoints | self._endpoints, try_this
        self._first_listens.set()
        if all(each.has_listened for each in self._all):
            self._all_listen.set()

    async def _ask(self, question: Question, processes: Sequence[Process]) -> list[Any]:
        """Return the replies of the processes, NO_REPLY for those that do not reply in time."""
        return await asyncio.gather(*[self._ask_one(question, each) for each in processes])

    async def _ask_one(self, question: Question, process: Process) -> object:
        if process.channel is None or not process.is_listening:
            return NO_REPLY
        is_state, is_metrics = isinstance(question, AskState), isinstance(question, AskMetrics)
        kind: Any = ProcessState if is_state else Families if is_metrics else Any
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(STATE_S if is_state else ANSWER_S):
                answer = await process.channel.ask(question, kind)
                if is_state:
                    process.state = answer
                elif is_metrics:
                    process.metrics = answer
                return answer
        return NO_REPLY


async def _until_ended(processes: Sequence[Process], timeout_s: float | None = None) -> None:
    ends = [asyncio.create_task(each.child.wait()) for each in processes if each.child is not None]
    if ends:
        await asyncio.wait(ends, timeout=timeout_s)


async def serve_by_several(config: Config, argv: Sequence[str], stop: asyncio.Event) -> int:
    """Run a router with several processes until `stop` is set; return the exit status."""
    try:
        processes = Processes(config, argv)
    except OSError as error:
        log.error("cannot listen", reason=str(error))
        return 1
    watchdog = asyncio.create_task(keep_watchdog(lambda: True))
    try:
        return await processes.serve(stop)
    finally:
        watchdog.cancel()
        await processes.close()
