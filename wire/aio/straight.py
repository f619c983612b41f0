"""Writes that go straight to the socket, past the queue of its transport.

uvloop keeps what is written until its loop has done all else, and goes through its streams once
more.  For a token, which is a small write on a socket with room, that takes as long as a third of
the kernel's own work on it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial

# Writes all of it and says True, or none and says False: it would have to wait, or nobody reads.
Write = Callable[[bytes], bool]


def straight(transport: asyncio.Transport) -> Write:
    """Return the shortest way to write to `transport`, for what need not wait.

    What it refuses is the transport's: to keep until there is room, or to find out what is wrong.
    """
    if transport.get_extra_info("sslcontext") is not None:
        return partial(_by_transport, transport)
    return partial(_by_kernel, transport, transport.get_extra_info("socket").fileno())


def _by_kernel(transport: asyncio.Transport, fd: int, body: bytes) -> bool:
    # Closed, it may be another connection's: asked each time.
    if transport.get_write_buffer_size() or transport.is_closing():
        return False
    try:
        num_written = os.write(fd, body)
    except OSError:
        return False
    if num_written < len(body):
        transport.write(body[num_written:])
    return True


def _by_transport(transport: asyncio.Transport, body: bytes) -> bool:
    if transport.get_write_buffer_size() or transport.is_closing():
        return False
    transport.write(body)
    return True
