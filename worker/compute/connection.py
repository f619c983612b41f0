"""Connections between the processes of one model, and message exchange on several at once.

Both ends know the length of the next message, so messages have no headers.  If a connection has
keys, each message is encrypted ("sealed") with AES-256-GCM.  The nonce is the message's sequence
number, so a modified, repeated or omitted message fails authentication.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from wire.parts import Buffer

# Keepalive detects a lost host after 25 s.  Linux has all of these options, other systems fewer.
_TCP: Final = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# The send buffer of a Unix socket (TCP sizes its own); the system may grant less.
_UNIX_BYTES: Final = 1 << 20
_TAG_BYTES: Final = 16
_NONCE_BYTES: Final = 12


class ProcessLost(RuntimeError):
    """Another process of the model died, did not respond in time, or sent a corrupt message."""


class Connection:
    """A connection to process number `peer`.  One thread may send while another receives.

    `keys` encrypt sent and decrypt received messages; None on one machine, without encryption.
    """

    def __init__(
        self, sock: socket.socket, peer: int, keys: tuple[bytes, bytes] | None = None
    ) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BYTES)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name in _TCP.keys() & set(dir(socket)):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _TCP[name])
        self.socket, self.peer = sock, peer
        self._ciphers = None if keys is None else tuple(map(AESGCM, keys))
        self._num_sent = self._num_received = 0

    def close(self) -> None:
        """Close the socket after flushing sent messages; wake a thread that is receiving."""
        with suppress(OSError):  # the peer may already have closed the connection
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def seal(self, message: Buffer) -> Buffer:
        if self._ciphers is None:
            return message
        self._num_sent += 1
        return self._ciphers[0].encrypt(_nonce(self._num_sent), message, None)

    def receive_buffer(self, message: memoryview) -> memoryview:
        """Return the buffer to receive into: a longer one for a sealed message, else `message`."""
        sealed_bytes = len(message) + _TAG_BYTES
        return message if self._ciphers is None else memoryview(bytearray(sealed_bytes))

    def open(self, received: memoryview, message: memoryview) -> None:
        """Decrypt `received` into `message` if the connection has keys."""
        if self._ciphers is None:
            return
        self._num_received += 1
        try:
            message[:] = self._ciphers[1].decrypt(_nonce(self._num_received), received, None)
        except InvalidTag:
            raise ProcessLost(f"a message of process {self.peer} was changed in transit") from None

    def send_some(self, rest: memoryview) -> memoryview:
        """Send as many bytes as the socket accepts without blocking; return the unsent rest."""
        return rest[self._try(lambda: self.socket.send(rest)) :]

    def receive_some(self, rest: memoryview) -> memoryview:
        """Receive the bytes available without blocking; return the unfilled rest of the buffer."""
        return rest[self._try(lambda: self.socket.recv_into(rest)) :]

    def _try(self, call: Callable[[], int]) -> int:
        try:
            num_bytes = call()
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ProcessLost(f"process {self.peer} is gone: {error.strerror}") from None
        if not num_bytes:
            raise ProcessLost(f"process {self.peer} is gone")
        return num_bytes


def exchange(
    sends: Sequence[tuple[Connection, Buffer]],
    receives: Sequence[tuple[Connection, memoryview]],
    timeout_s: float | None = None,
) -> None:
    """Send and receive at most one message, of at least one byte, per connection.

    Raises:
        ProcessLost: Another process died, or the whole exchange took longer than `timeout_s`.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    unsent = {it: memoryview(it.seal(message)) for it, message in sends}
    buffers = {it: it.receive_buffer(message) for it, message in receives}
    unfilled = dict(buffers)
    while True:
        unsent = {it: rest for it, left in unsent.items() if (rest := it.send_some(left))}
        unfilled = {it: rest for it, left in unfilled.items() if (rest := it.receive_some(left))}
        if not unsent and not unfilled:
            break
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not _wait(unsent.keys(), unfilled.keys(), left_s):
            peer = min(it.peer for it in (*unsent, *unfilled))
            raise ProcessLost(f"process {peer} has not answered for {timeout_s:g} s")
    for it, message in receives:
        it.open(buffers[it], message)


def _wait(unsent: Set[Connection], unfilled: Set[Connection], timeout_s: float | None) -> bool:
    """Wait until a connection is ready to send or receive; return False on timeout."""
    poll = select.poll()
    for it in unsent | unfilled:
        wanted = select.POLLOUT * (it in unsent) | select.POLLIN * (it in unfilled)
        if (fd := it.socket.fileno()) < 0:
            return True  # another thread closed it: the next send or receive raises ProcessLost
        poll.register(fd, wanted)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "little")
