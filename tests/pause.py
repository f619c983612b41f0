"""The process stands still, as one that is frozen: then timers are due before sockets are read."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable


async def stand_still(pause_s: float, meanwhile: Callable[[], object]) -> None:
    """Do nothing but `meanwhile` for so long, then go on where an event loop looks at timers."""
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()

    def on_readable() -> None:
        loop.remove_reader(ours)
        meanwhile()
        time.sleep(pause_s)
        is_over.set()

    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.add_reader(ours, on_readable)
        theirs.send(b"x")
        await is_over.wait()
