"""Passes the listening sockets of a router process to its parent, and on to its successor."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple


class Listeners(NamedTuple):
    """The descriptors of the sockets that a process listens on; their owner closes them."""

    http: int
    tcp: int
    bus: int

    def copy(self) -> Listeners:
        """Return new descriptors of the same sockets."""
        return Listeners(*map(os.dup, self))

    def close(self) -> None:
        for descriptor in self:
            os.close(descriptor)

    def send(self, over: socket.socket) -> None:
        """Send copies over a Unix socket."""
        socket.send_fds(over, [b"L"], list(self))


def receive(over: socket.socket) -> Listeners:
    """Return what the other end has sent.  Raises OSError if it has not sent anything yet."""
    over.setblocking(False)  # Python ignores the flags of `recv_fds`
    _, descriptors, _, _ = socket.recv_fds(over, 1, len(Listeners._fields))
    for descriptor in descriptors:  # no worker is to keep a port open
        os.set_inheritable(descriptor, False)
    if len(descriptors) != len(Listeners._fields):
        raise OSError(f"{len(descriptors)} descriptors were sent, not {len(Listeners._fields)}")
    return Listeners(*descriptors)
