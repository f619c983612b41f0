"""The only router process of a router, until a restart makes it the parent of its successors.

It starts a successor as the parent of several processes does (`router.processes.supervisor`), and
is to it another process with a channel to the parent.  When the successor serves, this process
finishes its clients and goes on as the parent, so that its process id, its terminal and its local
workers stay.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from router.app import Router, serve
from router.config import Config
from router.processes.process import Process
from router.processes.siblings import Siblings
from router.processes.supervisor import Processes
from wire.process.lifetime import keep_watchdog


class Alone:
    """Restarts the router that `adopt` is given; `handed_over` is set when a successor serves."""

    def __init__(self, config: Config, argv: Sequence[str]) -> None:
        self._config = config
        self._argv = argv
        self._restarting = asyncio.Lock()
        self._tasks: set[asyncio.Task[str]] = set()
        self._router: Router
        self.processes: Processes | None = None
        self.own: Process | None = None
        self.siblings: Siblings | None = None
        self.handed_over = asyncio.Event()

    def adopt(self, router: Router) -> None:
        """Allow restarts of a router that serves."""
        self._router = router
        router.restart = self.restart
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._restart_later)

    def _restart_later(self) -> None:
        task = asyncio.create_task(self.restart())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def restart(self) -> str:
        """Start a successor; return why that failed, or ""."""
        async with self._restarting:
            if self.processes is not None:
                return await self.processes.restart()
            return await self._hand_over()

    def forget_own(self) -> None:
        """Drop this process from the router's, after it has finished its clients."""
        assert self.processes is not None and self.own is not None
        self.processes.detach(self.own)

    async def _hand_over(self) -> str:
        router = self._router
        (ours, theirs), (near, far) = socket.socketpair(), socket.socketpair()
        near.close()  # the sockets of this process are known
        own = Process(0, router.endpoints["bus"])
        processes = Processes(self._config, self._argv, own, dict(router.endpoints))
        siblings = Siblings(theirs, far)
        await processes.attach(own, ours, router.listeners())
        await siblings.open()
        router.join(siblings)
        if problem := await processes.restart():
            router.join(None)
            await siblings.close()
            await processes.close()
            return problem
        self.processes, self.own, self.siblings = processes, own, siblings
        if router.local is not None:
            processes.take_local(router.local)
            router.local = None
        self.handed_over.set()
        return ""


async def serve_alone(
    config: Config,
    argv: Sequence[str],
    model_path: Path,
    model_fingerprint: str,
    stop: asyncio.Event,
) -> int:
    """Run a router as one process until `stop` is set; return the exit status."""
    alone = Alone(config, argv)
    watchdog = asyncio.create_task(keep_watchdog(lambda: True))
    own = asyncio.create_task(
        serve(config, model_path, model_fingerprint, stop, on_start=alone.adopt)
    )
    handed_over = asyncio.create_task(alone.handed_over.wait())
    try:
        await asyncio.wait([own, handed_over], return_when=asyncio.FIRST_COMPLETED)
        if alone.processes is None:
            return await own
        own.add_done_callback(lambda _: alone.forget_own())
        status = await alone.processes.serve(stop)
        await own
        return status
    finally:
        for task in (watchdog, handed_over, own):
            task.cancel()
        await asyncio.gather(own, return_exceptions=True)
        if alone.processes is not None and alone.siblings is not None:
            await alone.processes.close()
            await alone.siblings.close()
