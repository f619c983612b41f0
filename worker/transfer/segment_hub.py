"""A decode worker's end of the segment connections, TCP connections for KV only.  SPEC 6.9.

Each connection has a thread that reads its socket.  The thread reads the head of a segment and
posts it to the event loop, which admits the segment while the thread receives the KV into the
connection's own buffer.  Then the same thread verifies the KV and stores it in its blocks: no
segment is handed from thread to thread.

A connection must begin with a token from an offer, which identifies the prefill worker.  Any other
connection is closed before a thread is started or a buffer allocated for it.
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

# Within this time a new connection must send its token; how many connections may be in this phase.
GREETING_S: Final = 5.0
MAX_GREETINGS: Final = 64
A = TypeVar("A")


class SegmentHandler(Protocol[A]):
    """Handles received segments: `admit` and `stored` on the event loop, `store` on a thread."""

    def admit(self, peer: bytes, frame: KvCache, descriptor: Buffer, kv: Buffer) -> A | None:
        """Admit a segment, or return None to drop it; `kv` has its length but no contents yet."""

    def store(self, arrival: A) -> Exception | None:
        """Verify the received KV and store it in its blocks; return the error, if any."""

    def stored(self, arrival: A, problem: Exception | None, *, is_last: bool) -> None:
        """Record the result of `store`; `is_last` if no further segment has arrived."""


class SegmentHub(Generic[A]):
    """Listens on `port` for segment connections of prefill workers, and has their readers."""

    def __init__(self, host: str, port: int, handler: SegmentHandler[A]) -> None:
        """Listen on `host`; port 0 chooses any free port.  Raises OSError."""
        self._handler = handler
        self._calls = LoopCalls()
        self._tokens: dict[bytes, bytes] = {}  # the latest token by peer identity
        self._used: set[bytes] = set()  # peers whose token has been used
        self._readers: dict[bytes, _Reader[A]] = {}  # by `_name`: one per worker, in any epoch
        self._running: set[_Reader[A]] = set()  # those whose thread has not ended
        listening = bind(host.strip("[]"), port)
        self.port = int(listening.getsockname()[1])
        self._acceptor = Acceptor(listening, self._greet, MAX_GREETINGS)

    def expect(self, peer: bytes, token: bytes) -> None:
        """Accept one connection with `token` from `peer`; close one that used an older token."""
        if not compare_digest(self._tokens.get(peer, b""), token):
            self.forget(peer)
            self._tokens[peer] = token

    def forget(self, peer: bytes) -> None:
        """Reject further connections from `peer` and close the current one."""
        self._tokens.pop(peer, None)
        self._used.discard(peer)
        reader = self._readers.get(_name(peer))
        if reader is not None and reader.peer == peer:
            reader.disconnect()
            del self._readers[_name(peer)]

    async def close(self) -> None:
        self._acceptor.close()
        await self._acceptor.wait_closed()
        for reader in list(self._running):
            reader.disconnect()
            await reader.ended
        self._calls.close()

    async def _greet(self, client: socket.socket) -> None:
        """Read segments from a client that greets with a valid token; disconnect any other."""
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
            pass  # an incomplete greeting is rejected below
        peer = self._consume_token(greeting)
        if not peer:
            client.close()
            return
        client.setblocking(True)
        try:
            reader = _Reader(peer, client, self._handler, self._calls)
        except RuntimeError as error:  # no thread could be started
            log.error("cannot read segments", peer=peer.decode(), reason=str(error))
            client.close()
            return
        if (older := self._readers.get(_name(peer))) is not None:
            older.disconnect()
        self._readers[_name(peer)] = reader
        self._running.add(reader)
        reader.ended.add_done_callback(lambda _: self._on_ended(reader))

    def _consume_token(self, greeting: bytes) -> bytes:
        """Mark the token in a greeting as used and return its peer; b"" if it is not valid."""
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
        self._running.discard(reader)
        if self._readers.get(_name(reader.peer)) is reader:
            del self._readers[_name(reader.peer)]


def _name(peer: bytes) -> bytes:
    """Return an identity without its epoch: `prefill-0` for `prefill-0-<epoch>`."""
    return peer.rpartition(b"-")[0]


class _Reader(Generic[A]):
    """One segment connection and its thread; `ended` is done when the thread has ended."""

    def __init__(
        self, peer: bytes, client: socket.socket, handler: SegmentHandler[A], calls: LoopCalls
    ) -> None:
        self.peer = peer
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._socket, self._handler, self._calls = client, handler, calls
        self._admissions: SimpleQueue[A | None] = SimpleQueue()  # one result for each segment
        self._poll = select.poll()
        self._poll.register(client, select.POLLIN)
        thread = threading.Thread(target=self._main, name="kv-segments", daemon=True)
        thread.start()

    def disconnect(self) -> None:
        """Close the connection, dropping a partly received segment."""
        with suppress(OSError):  # the peer has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def _main(self) -> None:
        try:
            buffer = memoryview(bytearray(MAX_SEALED_BYTES))
            head = memoryview(bytearray(HEAD_BYTES))
            self._socket.sendall(GREETING)
            while self._read(head):
                frame, descriptor, num_bytes = read_head(bytes(head))
                kv = buffer[:num_bytes]
                self._calls.post(partial(self._admit_segment, frame, descriptor, kv))
                is_whole = self._read(kv)
                arrival = self._admissions.get()
                if arrival is None:
                    continue
                problem = self._handler.store(arrival) if is_whole else PeerLost(self.peer.decode())
                is_last = not self._poll.poll(0)
                stored = partial(self._handler.stored, arrival, problem, is_last=is_last)
                self._calls.post(stored)
        except (OSError, MemoryError, RemoteProtocolError) as error:
            reason = str(error)
            self._calls.post(partial(log.warning, "connection for segments cut", reason=reason))
        finally:
            self._calls.post(self._end)

    def _read(self, buffer: memoryview) -> bool:
        """Fill `buffer` from the socket; return False if the connection ends first."""
        with suppress(OSError):  # a reset connection has ended too
            while num_bytes := self._socket.recv_into(buffer, 0, socket.MSG_WAITALL):
                if num_bytes == len(buffer):
                    return True
                buffer = buffer[num_bytes:]
        return False

    def _admit_segment(self, frame: KvCache, descriptor: bytes, kv: memoryview) -> None:
        arrival = None
        try:
            arrival = self._handler.admit(self.peer, frame, descriptor, kv)
        finally:
            self._admissions.put(arrival)

    def _end(self) -> None:
        self._socket.close()
        self.ended.set_result(None)
