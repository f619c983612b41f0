"""The authentication handshake between the processes of one worker.

A Unix socket reveals the user of the peer process, which must be the same user.  On every
connection both ends prove that they have a shared secret before any other message is read.  Each
end sends an ephemeral X25519 public key.  The proofs and the encryption keys of the messages are
derived by HMAC-SHA256 with the secret, over the hello, both public keys and the X25519 result.

    caller -> called   the hello: which connection this is (`Caller`), public key
    called -> caller   public key, proof
    caller -> called   proof
    called -> caller   one byte: 1, or 0 if this connection is not expected
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import struct
import sys
import time
from collections.abc import AsyncGenerator
from enum import IntEnum
from typing import Final, NamedTuple

import structlog
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from wire.aio.unix import is_own, user_of
from worker.compute.connection import Connection

# The timeout of a handshake, and the maximum number of pending ones: beyond it the oldest is
# cancelled.  A process whose handshake was cancelled tries again.
HANDSHAKE_S: Final = 5.0
MAX_PENDING: Final = 64
# The pause after accept() fails, for example for lack of file descriptors.
PAUSE_S: Final = 0.1
_MAGIC: Final = b"baton 1\0"
_CALL: Final = struct.Struct("<8sHHB32s")
_KEY_BYTES: Final = 32
_log: Final = structlog.get_logger("worker")


class Purpose(IntEnum):
    """The use of a connection: model `STEPS` and commands, KV `COPIES`, or liveness (`WATCH`)."""

    STEPS = 0
    COPIES = 1
    WATCH = 2


class Caller(NamedTuple):
    """Identifies a connection, from process number `caller` to process number `called`."""

    caller: int
    called: int
    purpose: Purpose = Purpose.STEPS


class Refused(ConnectionError):
    """The peer does not belong to this worker."""


async def call(
    sock: socket.socket, caller: Caller, secret: bytes, *, is_sealed: bool
) -> Connection:
    """Perform a mutual handshake with a listening process, as the caller.

    If `is_sealed`, later messages are encrypted; the listener must have the same setting.

    Raises:
        Refused: The peer belongs to another user, or has another secret.
        ValueError: The peer does not expect this connection.
        OSError: The peer closed the connection, or did not respond in time.
    """
    if not _is_own(sock):
        raise Refused(f"a process of user {user_of(sock)} listens there; choose another address")
    loop, own = asyncio.get_running_loop(), X25519PrivateKey.generate()
    hello = _CALL.pack(_MAGIC, *caller, own.public_key().public_bytes_raw())
    async with asyncio.timeout(HANDSHAKE_S):
        await loop.sock_sendall(sock, hello)
        public, proof = await _receive(sock, _KEY_BYTES), await _receive(sock, _KEY_BYTES)
        secrets = _Secrets(secret, hello + public, own, public)
        if not hmac.compare_digest(proof, secrets.derive("called")):
            raise Refused(
                "a process listens there that has another key; give all processes of a worker the "
                "same --role, --rank and --keys"
            )
        await loop.sock_sendall(sock, secrets.derive("caller"))
        is_admitted = await _receive(sock, 1) == b"\1"
    if not is_admitted:
        raise ValueError(
            f"process {caller.caller} of this worker has come before, or it has not so many; give "
            "each process its own --process, and each worker its own --rendezvous"
        )
    keys = secrets.derive("from caller"), secrets.derive("from called")
    return Connection(sock, caller.called, keys if is_sealed else None)


class Listener:
    """Accepts each connection in `missing` once, if its peer proves that it has the secret."""

    def __init__(self, listening: socket.socket, secret: bytes, *, is_sealed: bool) -> None:
        listening.setblocking(False)
        self.socket, self.secret, self._is_sealed = listening, secret, is_sealed
        self.missing = set[Caller]()
        self._num_refused, self._quiet_until = 0, 0.0

    async def admit(self) -> AsyncGenerator[tuple[Caller, Connection], None]:
        """Yield authenticated connections as they arrive, until none is missing."""
        loop, num_missing = asyncio.get_running_loop(), len(self.missing)
        pending = dict[asyncio.Task[tuple[Caller, Connection] | None], None]()  # the oldest first
        accepting = asyncio.ensure_future(loop.sock_accept(self.socket))
        while num_missing:
            await asyncio.wait({accepting, *pending}, return_when=asyncio.FIRST_COMPLETED)
            for task in [it for it in pending if it.done()]:
                del pending[task]
                if (admitted := task.result()) is not None:
                    num_missing -= 1
                    yield admitted
            if accepting.done():
                try:
                    pending[asyncio.create_task(self._answer(accepting.result()[0]))] = None
                except OSError as error:
                    self._refuse(f"cannot accept it: {error.strerror}")
                    await asyncio.sleep(PAUSE_S)
                if len(pending) > MAX_PENDING:
                    next(iter(pending)).cancel()
                accepting = asyncio.ensure_future(loop.sock_accept(self.socket))
        for unneeded in (accepting, *pending):
            unneeded.cancel()

    async def _answer(self, sock: socket.socket) -> tuple[Caller, Connection] | None:
        """Perform the handshake with a timeout; log a failure and return None."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                return await self._handshake(sock)
        except (OSError, ValueError, asyncio.CancelledError) as error:
            sock.close()
            self._refuse(str(error) or "it did not authenticate in time")
            return None

    async def _handshake(self, sock: socket.socket) -> tuple[Caller, Connection]:
        if not _is_own(sock):
            raise Refused(f"it is of user {user_of(sock)}")
        loop = asyncio.get_running_loop()
        hello = await _receive(sock, _CALL.size)
        magic, number, called, purpose, public = _CALL.unpack(hello)
        if magic != _MAGIC:
            raise Refused("it does not speak this protocol")
        caller = Caller(number, called, Purpose(purpose))
        own = X25519PrivateKey.generate()
        answer = own.public_key().public_bytes_raw()
        secrets = _Secrets(self.secret, hello + answer, own, public)
        await loop.sock_sendall(sock, answer + secrets.derive("called"))
        proof = await _receive(sock, _KEY_BYTES)
        if not hmac.compare_digest(proof, secrets.derive("caller")):
            raise Refused("it has another key")
        is_missing = caller in self.missing
        await loop.sock_sendall(sock, bytes([is_missing]))
        if not is_missing:
            raise Refused(f"process {caller.caller} has connected before, or there is none")
        self.missing.remove(caller)
        keys = secrets.derive("from called"), secrets.derive("from caller")
        return caller, Connection(sock, caller.caller, keys if self._is_sealed else None)

    def _refuse(self, reason: str) -> None:
        """Count a refused connection, and log at most one per second."""
        self._num_refused += 1
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + 1.0
            _log.warning(
                "a connection to a process of the model is refused",
                reason=reason,
                refused_so_far=self._num_refused,
            )


class _Secrets:
    """Derives the proofs and keys of one connection from the secret and the handshake."""

    def __init__(self, secret: bytes, hello: bytes, own: X25519PrivateKey, public: bytes) -> None:
        agreed = own.exchange(X25519PublicKey.from_public_bytes(public))
        self._shared = hmac.digest(secret, hello + agreed, "sha256")

    def derive(self, label: str) -> bytes:
        return hmac.digest(self._shared, label.encode(), "sha256")


async def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < num_bytes:
        got += (more := await loop.sock_recv(sock, num_bytes - len(got)))
        if not more:
            raise ConnectionError("it hung up before it authenticated")
    return got


def _is_own(sock: socket.socket) -> bool:
    """Return whether the peer belongs to this user; True if the socket cannot tell."""
    return sock.family != socket.AF_UNIX or sys.platform != "linux" or is_own(sock)
