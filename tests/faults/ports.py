"""Ports for processes that are yet to listen, or that will listen again where they did.

A port that the kernel found free is anybody's as soon as it is closed: the kernel goes on giving
such ports to whoever binds 0 or connects.  So these lie outside of its range, in a block that is
this process's own: it holds the first port of the block, and nobody else takes from it meanwhile.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
from functools import cache
from pathlib import Path
from typing import Final

BLOCK: Final = 64
# Below are the ports of well-known services.
FIRST: Final = 10_000
LAST: Final = 65_535
HOST: Final = "127.0.0.1"
_KERNELS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
# What is used where there is no /proc.
_REGISTERED: Final = (49_152, LAST)


def free_port() -> int:
    """Return a port of this process's own on which nobody listens; the next call's is another."""
    _, ports = _block()
    for _ in range(BLOCK):
        port = next(ports)
        try:
            socket.create_server((HOST, port)).close()
        except OSError:  # a server of somebody who does not ask here
            continue
        return port
    raise OSError("every port of this process's block is taken")


def kernels_range() -> tuple[int, int]:
    """The first and the last port that the kernel gives away by itself."""
    if not _KERNELS.exists():
        return _REGISTERED
    low, high = map(int, _KERNELS.read_text().split())
    return low, high


@cache
def _block() -> tuple[socket.socket, itertools.cycle[int]]:
    """Find a block that is nobody's; return what holds it, and its other ports again and again."""
    low, high = kernels_range()
    firsts = [*range(FIRST, low - BLOCK + 1, BLOCK), *range(high + 1, LAST - BLOCK + 2, BLOCK)]
    start = os.getpid() % len(firsts) if firsts else 0
    for first in firsts[start:] + firsts[:start]:
        holder = socket.socket()
        try:
            holder.bind((HOST, first))
        except OSError:
            holder.close()
            continue
        atexit.register(holder.close)
        return holder, itertools.cycle(range(first + 1, first + BLOCK))
    raise OSError("no block of ports is free outside of the kernel's range")
