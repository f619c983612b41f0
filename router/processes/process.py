"""One router process as its parent sees it."""

from __future__ import annotations

import asyncio
import socket

from router.core.cluster import ProcessState
from router.processes.channel import Channel
from router.processes.listeners import Listeners
from router.processes.merged_metrics import Families, without_gauges
from wire.process.children import signal_child


class Process:
    """One router process, and its replacements when it dies.

    `listeners` are copies of its listening sockets.  `predecessor` serves until this one does, and
    `successor` is to take over from this one.  `life` is the task that keeps it running; None if
    this is the process that the parent's code runs in.
    """

    def __init__(self, index: int, bus: str) -> None:
        self.index = index
        self.bus = bus
        self.channel: Channel | None = None
        self.child: asyncio.subprocess.Process | None = None
        self.predecessor: Process | None = None
        self.successor: Process | None = None
        self.life: asyncio.Task[int] | asyncio.Task[None] | None = None
        self.sockets: socket.socket | None = None
        self.listeners: Listeners | None = None
        self.is_listening = self.has_listened = False
        self.listens = asyncio.Event()
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
        self.listens.clear()
        self.drained.set()
        counters, self.metrics = without_gauges(self.metrics), []
        return counters

    def keep(self, listeners: Listeners | None) -> None:
        """Replace the copies of the listening sockets; without any, they close with the process."""
        if self.listeners is not None:
            self.listeners.close()
        self.listeners = listeners
