"""`--processes N`: the parent of router processes that share one port.

The parent reserves the addresses, runs the local workers, notifies systemd, and relays requests
between processes.  Each process is a complete router with its own bus, which all workers join.
Linux distributes the connections over the processes (SO_REUSEPORT).

    start   the first process starts alone, so that errors are logged only once, then the others
    death   the other processes continue; a new process gets the bus of the dead one, and accepts
            clients once workers have joined it
    stuck   a process that does not reply for `STUCK_S`, or does not serve clients `START_S` after
            its start, is killed, after its stacks are logged; also while it finishes its clients
    stop    all processes drain, then the local workers are stopped, then the processes
    restart a successor of each process runs the code that is on the disk by then.  It inherits the
            listening sockets, so that no connection is refused, and takes over the bus: the old
            process tells the workers to join the successor too.  When that serves, the old process
            finishes its clients and ends; if it fails to, the old one goes on
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

from router.app import REPORT_S
from router.config import Config
from router.core.cluster import ProcessState, Readiness, is_free, reasons_of, status_line
from router.endpoints import announce, named, split_address
from router.http.server import FLUSH_S
from router.local import LocalWorkers
from router.processes.channel import Answers, Ask, AskAll, Assignment, Channel, Listening, Question
from router.processes.listeners import Listeners, receive
from router.processes.merged_metrics import Families, summed
from router.processes.process import Process
from router.processes.siblings import VARIABLE
from wire.aio.listener import reserve
from wire.process.children import MIN_PAUSE_S, lives, start_child
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


class Processes:
    """Runs all router processes and the local workers.  Raises OSError if an address is in use.

    If `first` serves already, at `endpoints`, only its successors are started here.
    """

    def __init__(
        self,
        config: Config,
        argv: Sequence[str],
        first: Process | None = None,
        endpoints: dict[str, str] | None = None,
    ) -> None:
        self._config = config
        self._argv = argv
        self._reserved: list[socket.socket] = []
        self._endpoints = endpoints or {}
        if first is None:
            for flag, endpoint in (("--http", config.http), ("--tcp", config.tcp)):
                with named(flag, endpoint):
                    self._reserved.append(reserve(*split_address(endpoint), self._reserved))
        buses = [config.bus_of(index) for index in range(config.processes)]
        self._all = [first or Process(index, bus) for index, bus in enumerate(buses)]
        # Successors that do not serve yet, and processes that finish their clients.
        self._others: list[Process] = []
        self._restarting = asyncio.Lock()
        self._has_failed = asyncio.Event()
        self._status = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._local: LocalWorkers | None = None
        self._attached: Channel | None = None  # of the process that this object runs in
        self._first_listens, self._all_listen = asyncio.Event(), asyncio.Event()
        self._may_end = asyncio.Event()
        self._is_stopping = False
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
        for process in self._all:
            if process.channel is None:
                process.life = self._start(self._keep_first(process))
        stopped, monitor = self._start(stop.wait()), self._start(self._monitor())
        failed = self._start(self._has_failed.wait())
        await asyncio.wait([stopped, monitor, failed], return_when=asyncio.FIRST_COMPLETED)
        if monitor.done():
            monitor.result()  # raises, because it ends only with an error
        monitor.cancel()
        await self._stop(self._config.drain_s if stopped.done() else 0.0)
        return self._status

    async def restart(self) -> str:
        """Replace all processes, one after another; return why that failed, or ""."""
        if not sys.platform.startswith("linux") or self._config.bus.startswith("ipc://"):
            return "a router is restarted only on Linux, with --bus tcp://HOST:PORT"
        async with self._restarting:
            for process in tuple(self._all):
                if self._is_stopping:
                    return "the router is stopping"
                if problem := await self._replace(process):
                    return problem
        return ""

    def restart_later(self) -> None:
        """Replace all processes without waiting, on a signal."""
        self._start(self.restart())

    def take_local(self, local: LocalWorkers) -> None:
        """Look after local workers that run already."""
        local.is_free = lambda role, rank: is_free(self._states(), role, rank)
        self._local = local

    async def attach(self, own: Process, channel: socket.socket, listeners: Listeners) -> None:
        """Take the process that this code runs in as one that serves, without a child."""
        own.channel = self._attached = Channel(channel, lambda asked: self._answer(own, asked))
        own.listeners, own.is_listening, own.has_listened = listeners, True, True
        own.replied_at = asyncio.get_running_loop().time()
        await own.channel.open()

    def detach(self, own: Process) -> None:
        """Keep the counters of that process, which has finished its clients."""
        self._ended_counters = summed([self._ended_counters, own.forget()])
        self._others.remove(own)

    async def _replace(self, old: Process) -> str:
        """Start a successor, and let the process retire when it serves; return what failed."""
        successor = old.successor = Process(old.index, old.bus)
        successor.predecessor = old
        self._others.append(successor)
        successor.life = life = self._start(self._keep_running(successor))
        listens = self._start(successor.listens.wait())
        await asyncio.wait([life, listens], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        successor.predecessor = None
        self._others.remove(successor)
        if not listens.done():
            listens.cancel()
            successor.signal(signal.SIGKILL)
            return await self._keep_old(old, await life)
        self._all[old.index] = successor
        if old.life is None or not old.life.done():  # it did not die meanwhile
            self._others.append(old)
        old.keep(None)
        log.info("router process restarted", process=old.index)
        await self._ask_one(Ask.RETIRE, old)
        return ""

    async def _keep_old(self, old: Process, status: int) -> str:
        """Let a process go on after its successor has failed; return that as a sentence."""
        old.successor = None
        log.error("the successor failed; the old goes on", process=old.index, status=status)
        if old.life is not None and old.life.done():  # it died meanwhile
            old.life = self._start(self._keep_first(old))
        await self._ask_one(Ask.KEEP_BUS, old)
        return (
            f"the successor of process {old.index} ended with status {status} before it served: "
            "the router's log says why. The old process goes on"
        )

    async def close(self) -> None:
        """Kill the remaining processes and free the addresses."""
        self._is_stopping = True
        for process in self._every:
            process.signal(signal.SIGKILL)
        await _until_ended(self._every)
        if self._local is not None:
            await self._local.stop(0.0)
        if self._attached is not None:
            await self._attached.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reserved in self._reserved:
            reserved.close()
        for process in self._every:
            process.keep(None)

    @property
    def _every(self) -> list[Process]:
        """All processes, with those that start and those that finish their clients."""
        return [*self._all, *self._others]

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _monitor(self) -> None:
        """Wait until all processes serve clients, start the local workers, and monitor both."""
        if self._local is None:
            await self._start_local()
        assert self._local is not None
        readiness, loop = Readiness(self._try_this), asyncio.get_running_loop()
        while True:
            await self._poll()
            states = self._states()
            notify(f"STATUS={status_line(states)}")
            readiness.on_look(reasons_of(states), loop.time())
            self._local.check(states)
            await asyncio.sleep(REPORT_S)

    async def _start_local(self) -> None:
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

    async def _stop(self, drain_s: float) -> None:
        """Drain all processes, then stop the local workers, then let the processes end."""
        self._is_stopping = True
        for process in self._every:
            process.signal(signal.SIGTERM if process.is_listening else signal.SIGKILL)
        here = [process for process in self._every if process.is_listening]
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
        for process in self._every:
            for number in numbers:
                process.signal(number)
        await _until_ended(self._every, FLUSH_S / 2)

    def _states(self) -> list[ProcessState]:
        return [process.state for process in self._all if process.state is not None]

    async def _keep_first(self, process: Process) -> None:
        """Keep a process running that has no predecessor; if it cannot serve, end the router.

        If it dies while its successor starts, that one replaces it or `_keep_old` starts it again.
        """
        status = await self._keep_running(process)
        if not (process.successor or self._is_stopping or self._status):
            self._status = max(status, 0) or 1
            self._has_failed.set()

    async def _keep_running(self, process: Process) -> int:
        """Restart a process whenever it dies; return its exit status if it never served clients,
        or if it has a successor."""
        run = partial(self._run, process)
        async for status in lives(run, log.bind(process=process.index), MIN_PAUSE_S):
            self._ended_counters = summed([self._ended_counters, process.forget()])
            if process.successor is not None and process in self._others:
                self._others.remove(process)
            if self._is_stopping or process.successor or not process.has_listened:
                return status
            if len(self._all) > 1:  # until it is back, new clients reach the others
                process.keep(None)
        raise AssertionError("there is always a next life")

    async def _run(self, process: Process) -> int:
        """Run a process until it ends and return its exit status."""
        if self._is_stopping or process.successor:  # since the backoff before this start
            return 0
        (ours, theirs), (process.sockets, far) = socket.socketpair(), socket.socketpair()
        if inherited := _inherited(process):
            inherited.send(process.sockets)
        process.channel = channel = Channel(ours, lambda asked: self._answer(process, asked))
        environ = {name: it for name, it in os.environ.items() if name not in PARENT_ONLY}
        try:
            with theirs, far:
                descriptors = [theirs.fileno(), far.fileno()]
                process.child = child = await start_child(
                    [sys.executable, "-m", "router", *self._argv],
                    environ | {VARIABLE: ",".join(map(str, descriptors))},
                    descriptors,
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
            process.sockets.close()

    async def _poll(self) -> None:
        """Poll the states of all processes, and kill those that have not replied for too long.

        A long gap between two polls means that this process or the machine was paused, so the gap
        is not counted.
        """
        here = [process for process in self._every if process.channel is not None]
        states = await self._ask(Ask.STATE, here)
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
            case Ask.ASSIGNMENT:
                if process.index and not process.predecessor:
                    await self._first_listens.wait()
                process.replied_at = asyncio.get_running_loop().time()
                return self._assignment(process)
            case Listening(endpoints, try_this):
                self._on_listening(process, endpoints, try_this)
            case Ask.TAKE_BUS:
                old = process.predecessor
                names = NO_REPLY if old is None else await self._ask_one(Ask.RELEASE_BUS, old)
                return None if names is NO_REPLY else names
            case Ask.RESTART:
                return await asyncio.shield(self._start(self.restart()))
            case Ask.DRAINED:
                await self._ask_one(Ask.METRICS, process)  # for the last time
                process.drained.set()
                if self._is_stopping:  # otherwise only this process drains, and is restarted
                    await self._may_end.wait()
            case AskAll(Ask.METRICS):
                await self._ask(Ask.METRICS, self._every)
                every = [self._ended_counters, *(each.metrics for each in self._every)]
                return Answers(every, is_complete=True)
            case AskAll(asked):
                listening = [each for each in self._every if each.is_listening]
                answers = await self._ask(asked, listening)
                given = [each for each in answers if each is not NO_REPLY]
                return Answers(given, is_complete=len(given) == len(answers))
        return True

    def _assignment(self, process: Process) -> Assignment:
        ports = [reserved.getsockname()[1] for reserved in self._reserved] or [
            split_address(self._endpoints[name].partition("//")[2])[1] for name in ("http", "tcp")
        ]
        asked = (self._config.http, self._config.tcp)
        http, tcp = (
            f"{each.rpartition(':')[0]}:{port}" for each, port in zip(asked, ports, strict=True)
        )
        return Assignment(
            process.index,
            len(self._all),
            http,
            tcp,
            process.bus,
            is_again=process.has_listened or process.predecessor is not None,
            inherits=_inherited(process) is not None,
        )

    def _on_listening(self, process: Process, endpoints: dict[str, str], try_this: str) -> None:
        process.is_listening = process.has_listened = True
        assert process.sockets is not None
        process.keep(receive(process.sockets))
        process.listens.set()
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
        is_state, is_metrics = question is Ask.STATE, question is Ask.METRICS
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


def _inherited(process: Process) -> Listeners | None:
    """Return the listening sockets that the next life of a process inherits."""
    return process.predecessor.listeners if process.predecessor else process.listeners


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
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, processes.restart_later)
    try:
        return await processes.serve(stop)
    finally:
        watchdog.cancel()
        await processes.close()
