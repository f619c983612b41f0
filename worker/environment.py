"""What a worker finds outside itself: the time, its connections, and the threads that compute.

One value, passed to `worker.app.Worker`; the defaults are the real things.  The simulation
(`scripts/simulate`) passes virtual time, a network of its own and threads that are events, and so
runs the very code that serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from wire.aio.zmq import Link
from wire.process.keys import Keys
from worker.engine.engine import Engine
from worker.engine.outputs import Output
from worker.engine.thread import EngineThread
from worker.interfaces import Computing, Connect, Copying, Plane
from worker.transfer.sockets import KVPlane
from worker.transfer.thread import Copies


@dataclass(frozen=True, slots=True)
class Environment:
    """`clock` gives monotonic seconds, `epoch` a number that grows from process to process."""

    clock: Callable[[], float] = time.monotonic
    epoch: Callable[[], int] = time.time_ns
    connect: Connect = Link
    make_plane: Callable[[int, Keys | None], Plane] = KVPlane
    make_thread: Callable[
        [Engine, Callable[[list[Output]], None], Callable[[BaseException], None]], Computing
    ] = EngineThread
    make_copies: Callable[[int], Copying] = Copies
