"""A decode worker's end of the segment connections: `SegmentHub`.  SPEC 6.9.

Each has a thread that blocks on its socket.  It reads a head and has the loop admit the segment
while the KV arrives in the connection's own memory; then it verifies it and stores it in its
blocks.  So one thread handles a segment and waits for no other.

A connection with a token from an offer belongs to that prefill worker; all others are closed before
a thread is started or memory taken.
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from contextlib import suppress
from functools import partial
from hmac import compare_digest
from queue import SimpleQueue
from typing import Final, Generic, Protocol, TypeVar

import structlog

from wire.aio.listener import Acceptor, bind
from wire.errors import PeerLost, RemoteProtocolError
from wire.frames import KvCache
from wire.parts import Buffer
from wire.transfer import GREETING, HEAD_BYTES, MAX_SEALED_BYTES, TOKEN_BYTES, read_head
from worker.transfer.thread import LoopCalls

log = structlog.get_logger("worker")

# For a new connection to send its token, and such connections at a time.
GREETING_S: Final = 5.0
MAX_GREETINGS: Final = 64
A = TypeVar("A")


class Taker(Protocol[A]):
    """Takes segments in; `admit` and `stored` are called on the loop, `store` on a thread."""

    def admit(self, peer: bytes, frame: KvCache, descriptor: Buffer, kv: Buffer) -> A | None:
        """Admit a segment of which only `kv`'s length is known yet; None drops it."""

    def store(self, arrival: A) -> Exception | None:
        """Verify the received KV and store it in its blocks; return the error, if any."""

    def stored(self, arrival: A, problem: Exception | None, *, is_last: bool) -> None:
        """Record the result of a segment; `is_last` if no more has arrived."""


class SegmentHub(Generic[A]):
    """The listening socket, on a `port` of its own, and the connections made there."""

    def __init__(self, host: str, port: int, taker: Taker[A]) -> None:
        """Listen; port 0 is any free one.  Raises OSError."""
        self._taker = taker
        self._calls = LoopCalls()
        self._tokens: dict[bytes, bytes] = {}  # by peer: the last that it sent
        self._used: set[bytes] = set()  # peers whose token has been used
        self._readers: dict[bytes, _Reader[A]] = {}  # by party: one, whatever the epoch
        self._ending: set[_Reader[A]] = set()
        listening = bind(host.strip("[]"), port)
        self.port = int(listening.getsockname()[1])
        self._acceptor = Acceptor(listening, self._greet, MAX_GREETINGS)

    def expect(self, peer: bytes, token: bytes) -> None:
        """Admit `peer` once with this token, and close its connection of an earlier token."""
        if not compare_digest(self._tokens.get(peer, b""), token):
            self.forget(peer)
            self._tokens[peer] = token

    def forget(self, peer: bytes) -> None:
        """Admit `peer` no more, and close its connection."""
        self._tokens.pop(peer, None)
        self._used.discard(peer)
        reader = self._readers.get(_party(peer))
        if reader is not None and reader.peer == peer:
            reader.cut()
            del self._readers[_party(peer)]

    async def close(self) -> None:
        self._acceptor.close()
        await self._acceptor.wait_closed()
        for reader in list(self._ending):
            reader.cut()
            await reader.ended
        self._calls.close()

    async def _greet(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        greeting = b""
        try:
            async with asyncio.timeout(GREETING_S):
                while missing := len(GREETING) + TOKEN_BYTES - len(greeting):
                    data = await loop.sock_recv(client, missing)
                    if not data:
                        break
                    greeting += data
        except (OSError, TimeoutError):
            pass  # an incomplete greeting is refused below
        peer = self._admit(greeting)
        if not peer:
            client.close()
            return
        client.setblocking(True)
        try:
            reader = _Reader(peer, client, self._taker, self._calls)
        except RuntimeError as error:  # there is no thread
            log.error("cannot read segments", peer=peer.decode(), reason=str(error))
            client.close()
            return
        if (older := self._readers.get(_party(peer))) is not None:
            older.cut()
        self._readers[_party(peer)] = reader
        self._ending.add(reader)
        reader.ended.add_done_callback(lambda _: self._on_ended(reader))

    def _admit(self, greeting: bytes) -> bytes:
        """Consume a token; return its peer, b"" for none."""
        if greeting[: len(GREETING)] != GREETING:
            return b""
        token = greeting[len(GREETING) :]
        for peer, expected in self._tokens.items():
            if compare_digest(expected, token) and peer not in self._used:
                self._used.add(peer)
                return peer
        log.debug("connection for segments refused: unknown token")
        return b""

    def _on_ended(self, reader: _Reader[A]) -> None:
        self._ending.discard(reader)
        if self._readers.get(_party(reader.peer)) is reader:
            del self._readers[_party(reader.peer)]


def _party(peer: bytes) -> bytes:
    """Return the party of an identity: `prefill-0` of `prefill-0-<epoch>`."""
    return peer.rpartition(b"-")[0]


class _Reader(Generic[A]):
    """One connection and its thread; `ended` when the thread is."""

    def __init__(
        self, peer: bytes, client: socket.socket, taker: Taker[A], calls: LoopCalls
    ) -> None:
        self.peer = peer
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._socket, self._taker, self._calls = client, taker, calls
        self._admissions: SimpleQueue[A | None] = SimpleQueue()  # one for each segment
        self._poll = select.poll()
        self._poll.register(client, select.POLLIN)
        thread = threading.Thread(target=self._main, name="kv-segments", daemon=True)
        thread.start()

    def cut(self) -> None:
        """Close the connection; a partial segment is dropped."""
        with suppress(OSError):  # it has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def _main(self) -> None:
        try:
            room = memoryview(bytearray(MAX_SEALED_BYTES))
            head = memoryview(bytearray(HEAD_BYTES))
            self._socket.sendall(GREETING)
            while self._read(head):
                frame, descriptor, num_bytes = read_head(bytes(head))
                kv = room[:num_bytes]
                self._calls.post(partial(self._admit_segment, frame, descriptor, kv))
                has_come = self._read(kv)
                arrival = self._admissions.get()
                if arrival is None:
                    continue
                problem = self._taker.store(arrival) if has_come else PeerLost(self.peer.decode())
                is_last = not self._poll.poll(0)
                stored = partial(self._taker.stored, arrival, problem, is_last=is_last)
                self._calls.post(stored)
        except (OSError, MemoryError, RemoteProtocolError) as error:
            reason = str(error)
            self._calls.post(partial(log.warning, "connection for segments cut", reason=reason))
        finally:
            self._calls.post(self._end)

    def _read(self, buffer: memoryview) -> bool:
        """Fill `buffer`; False if the connection ends before."""
        with suppress(OSError):  # however it ends
            while num_bytes := self._socket.recv_into(buffer, 0, socket.MSG_WAITALL):
                if num_bytes == len(buffer):
                    return True
                buffer = buffer[num_bytes:]
        return False

    def _admit_segment(self, frame: KvCache, descriptor: bytes, kv: memoryview) -> None:
        answer = None
        try:
            answer = self._taker.admit(self.peer, frame, descriptor, kv)
        finally:
            self._admissions.put(answer)

    def _end(self) -> None:
        self._socket.close()
        self.ended.set_result(None)
