"""Passes a file descriptor to other processes of the same user on this machine.

`DescriptorPort` listens under a random name in Linux's abstract namespace, which ends with the
process.  A process of the same user, by what the kernel says, gets one message with the descriptor;
then the connection is closed.  SPEC 6.8.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Final

import structlog

# Connections that may wait to be accepted; the next one tries again.
BACKLOG: Final = 64
AGAIN_S: Final = 0.01
# How long to wait for the listener's message, which it sends at once.
ANSWER_S: Final = 2.0
# How long to wait when no descriptor is left to accept a connection.
PAUSE_S: Final = 1.0
# The most bytes that may follow the greeting and a space; they describe the descriptor.
MAX_ABOUT_BYTES: Final = 64
# Linux shows any user of another user namespace, who has none here, as this one.
NOBODY: Final = 65534
# `struct ucred`: process, user, group.
_CREDENTIALS: Final = struct.Struct("3i")
_LOG: Final = structlog.get_logger(__name__)


class DescriptorPort:
    """Hands `descriptor` out on the running loop, with `greeting`, until closed.

    Raises:
        OSError: The system has no such sockets.
    """

    def __init__(
        self, descriptor: int, greeting: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = f"baton-{secrets.token_hex(16)}"
        self.num_refused = 0
        self._descriptor, self._greeting = descriptor, greeting
        self._clock, self._quiet_until = clock, 0.0
        self._loop = asyncio.get_running_loop()
        self._socket = _new_socket()
        try:
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(BACKLOG)
            self._loop.add_reader(self._socket, self._accept)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Hand out no more; nothing happens the second time."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return  # it has gone already
        except OSError as error:
            _LOG.warning("cannot accept a connection", error=str(error))
            self._loop.remove_reader(self._socket)
            self._loop.call_later(PAUSE_S, self._resume)
            return
        with connection:
            if not is_own(connection):
                self._note(user_of(connection))
                return
            try:
                connection.setblocking(False)
                socket.send_fds(connection, [self._greeting], [self._descriptor])
            except OSError as error:  # it hung up first
                _LOG.debug("memory was asked for, and not taken", error=str(error))

    def _note(self, user: int) -> None:
        """Log a refusal, at most one a second: refused peers must not fill the disk."""
        self.num_refused += 1
        now = self._clock()
        if now >= self._quiet_until:
            self._quiet_until = now + 1.0
            _LOG.warning(
                "another user asked for memory", user=user, refused_so_far=self.num_refused
            )

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)


async def fetch_descriptor(name: str, greeting: bytes) -> tuple[int, bytes]:
    """Return the descriptor of the port `name`, and the description that followed its greeting.

    The caller closes it.  Raises OSError if no process of this user listens with this greeting.
    """
    with _new_socket() as connection:
        try:
            async with asyncio.timeout(ANSWER_S):
                await _connect(connection, name)
                await _until_readable(connection)
        except TimeoutError:
            raise TimeoutError(f"who listens there says nothing for {ANSWER_S:g} s") from None
        most_bytes = len(greeting) + 1 + MAX_ABOUT_BYTES
        message, descriptors, _, _ = socket.recv_fds(connection, most_bytes + 1, 1)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    said, _, about = message[len(greeting) :].partition(b" ")
    is_known = message.startswith(greeting) and not said and len(message) <= most_bytes
    if not is_known or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionError("who listens there is another worker, or hands out nothing")
    return descriptors[0], about


async def _connect(connection: socket.socket, name: str) -> None:
    while True:
        try:
            connection.connect(f"\0{name}")
        except BlockingIOError:  # others wait there; nothing tells when there is room
            await asyncio.sleep(AGAIN_S)
        else:
            break
    if not is_own(connection):
        raise PermissionError(f"user {user_of(connection)} listens, not {os.geteuid()}")


async def _until_readable(connection: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is of our own user, on Linux."""
    return user_of(connection) == os.geteuid() != NOBODY
