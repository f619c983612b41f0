"""The handshake by which processes of one worker admit only each other.

On one machine a Unix socket names the user of the other process.  On every connection both ends
prove that they know a secret before they read anything else.  Each sends an X25519 public key made
for this connection; the proofs, and the keys that seal messages, are HMAC-SHA256 with the secret
over all bytes sent before and the agreed X25519 key.

    caller -> called   which connection this is (`Caller`), public key
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

# The time that a handshake may take, and the number of pending ones, beyond which the oldest is
# cut.  Processes that are cut try again.
HANDSHAKE_S: Final = 5.0
MAX_PENDING: Final = 64
# The pause after a connection could not be accepted for lack of descriptors.
PAUSE_S: Final = 0.1
_MAGIC: Final = b"baton 1\0"
_CALL: Final = struct.Struct("<8sHHB32s")
_KEY_BYTES: Final = 32
_log: Final = structlog.get_logger("worker")


class Purpose(IntEnum):
    """The use of a connection: `STEPS` and orders, `COPIES` of KV, or to `WATCH` for its end."""

    STEPS = 0
    COPIES = 1
    WATCH = 2


class Caller(NamedTuple):
    """A connection of the process `caller` to the process `called`."""

    caller: int
    called: int
    purpose: Purpose = Purpose.STEPS


class Refused(ConnectionError):
    """The other end does not belong to this worker."""


async def call(
    sock: socket.socket, caller: Caller, secret: bytes, *, is_sealed: bool
) -> Connection:
    """Authenticate to a listening process, and it to us.

    Raises:
        Refused: It belongs to another user, or has another secret.
        ValueError: It does not expect this connection.
        OSError: It hung up, or does not answer.
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
    """Admits each connection in `missing` once, if it knows the secret."""

    def __init__(self, listening: socket.socket, secret: bytes, *, is_sealed: bool) -> None:
        listening.setblocking(False)
        self.socket, self.secret, self._is_sealed = listening, secret, is_sealed
        self.missing = set[Caller]()
        self._num_refused, self._quiet_until = 0, 0.0

    async def admit(self) -> AsyncGenerator[tuple[Caller, Connection], None]:
        """Yield connections as they come, until none is missing."""
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
        """Log at most one refusal a second."""
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
    """Secrets that only the two ends of one connection know."""

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
    """Return whether the other process belongs to this user, or a Unix socket cannot tell."""
    return sock.family != socket.AF_UNIX or sys.platform != "linux" or is_own(sock)
