"""The raw TCP server, which uses the message format of `wire.stream`.  SPEC 2.2.

Limits bound the cost of a client: the number of connections, the rate at which a message arrives,
the pending bytes and their age.  A client that violates the protocol gets ERROR(0, PROTOCOL) and is
disconnected.  EOF from a client ends its connection: half-closed connections are not supported.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, cast

import structlog

from wire.aio.fair_writes import FairWrites
from wire.aio.listener import LAST_LOOK_S, Listener, bind, gets_refusal, listen
from wire.aio.slow_readers import STALL_S, SlowReader, has_left
from wire.errors import ErrorCode, RemoteProtocolError, WireError
from wire.frames import Error, Frame, Tag
from wire.parts import Buffer, Message
from wire.payloads import ErrorDetail, encode_map
from wire.process.frame_counters import Traffic
from wire.stream import DEFAULT_MAX_FRAME_BYTES, StreamDecoder, encode, encode_token

_LOG = structlog.get_logger(__name__)
# Messages handled for one client before others are served; they take a few milliseconds.
MAX_AT_ONCE: Final = 64
# How often to check for TLS clients that disconnected without close_notify.
LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for the clients of a server.

    At most `max_write_bytes` may be pending per client; above `high_water_bytes` the client must
    read at a minimum rate, measured over `stall_s` (`wire.aio.slow_readers`).  A message must be
    complete `message_s` after its first byte, plus the time for its size at `min_bytes_per_s`.  A
    TLS handshake must end, and the first message begin, within `message_s`.  A client without open
    requests may be idle for `idle_s`.  It must close the connection within `hang_up_s` after our
    last byte.
    """

    max_connections: int = 1024
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
    max_write_bytes: int = 8 << 20
    high_water_bytes: int = 256 << 10
    stall_s: float = STALL_S
    message_s: float = 5.0
    min_bytes_per_s: float = 64 << 10
    idle_s: float = 120.0
    hang_up_s: float = 1.0


class Handler(Protocol):
    """Handles one client's messages.  `on_closed` is called once, at the end, with None on EOF."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is open, so that the client may be idle."""

    def on_message(self, message: Message) -> None:
        """Handle one message.  Raises WireError to refuse it and close the connection."""

    def on_closed(self, error: Exception | None) -> None: ...


class Connection(asyncio.Protocol):
    """The server's side of one client's connection."""

    def __init__(
        self,
        make_handler: Callable[[Connection], Handler],
        limits: Limits,
        connections: set[Connection],
        traffic: Traffic,
        fair_writes: FairWrites,
        on_slow_client: Callable[[], object],
    ) -> None:
        self.peer_name = ""
        self.is_closing = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._make_handler = make_handler
        self._handler: Handler | None = None
        self._limits = limits
        self._connections = connections
        self._traffic = traffic
        self._fair_writes = fair_writes
        self._on_slow_client = on_slow_client
        # Messages of this iteration of the event loop, which are sent in one write.
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._decoder = StreamDecoder(max_frame_bytes=limits.max_frame_bytes)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._slow_reader: SlowReader
        self._message_began_at: float | None = None
        # When an overdue message will be refused, `LAST_LOOK_S` after its deadline.
        self._last_look_at: float | None = None
        self._active_at = self._loop.time()
        self._read_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None

    @property
    def buffered_bytes(self) -> int:
        """Number of pending bytes: sent by `send`, but not written to the kernel yet."""
        return self._transport.get_write_buffer_size() + self._unwritten_bytes

    def limit_frames(self, max_frame_bytes: int | None) -> None:
        """Set a smaller frame limit than the server's; None restores the server's limit."""
        self._decoder.max_frame_bytes = max_frame_bytes or self._limits.max_frame_bytes

    def send(self, frame: Frame, *payload: Buffer) -> None:
        """Queue one message, or do nothing after the end.  The caller may reuse the buffers."""
        if not self.is_closing:
            self._send(frame.tag, b"".join(encode(frame, *payload)))

    def send_token(self, request_id: int, token_id: int) -> None:
        """Queue a DECODE_TOKEN without payload, faster than `send`."""
        if not self.is_closing:
            self._send(Tag.DECODE_TOKEN, encode_token(request_id, token_id))

    def _send(self, tag: int, message: bytes) -> None:
        self._traffic.sent[tag] += 1
        if not self._unwritten:
            self._fair_writes.take(self)
        self._unwritten.append(message)
        self._unwritten_bytes += len(message)
        if self._unwritten_bytes > self._limits.high_water_bytes:
            self._write()

    def prepare(self, now: float) -> bytes:
        unwritten, self._unwritten, self._unwritten_bytes = self._unwritten, [], 0
        return b"".join(unwritten)

    def transmit(self, body: bytes) -> None:
        if self._transport.is_closing():
            return
        self._active_at = self._loop.time()
        self._transport.write(body)
        if self.buffered_bytes > self._limits.max_write_bytes:
            self._end(WireError(ErrorCode.OVERLOADED, f"{self.peer_name} does not read"))
            self._slow_reader.cut()

    def _write(self) -> None:
        """Write pending messages now, not at the end of the iteration."""
        if body := self.prepare(self._loop.time()):
            self.transmit(body)

    def refuse(self, error: WireError) -> None:
        """Send ERROR for the whole connection, then close it."""
        self.send(Error(0, error.code), encode_map(ErrorDetail(message=error.message[:4096])))
        self.close(error)

    def close(self, error: Exception | None = None) -> None:
        """Close the connection after sending pending bytes; `on_closed` is called immediately."""
        if self.is_closing:
            return
        self._write()
        self._end(error)
        self._slow_reader.hang_up(self._limits.hang_up_s)
        if not self._transport.can_write_eof():  # TLS, whose transport sends close_notify
            self._transport.close()
            return
        try:
            # Closing while bytes are unread would reset the connection and lose our last message.
            self._transport.write_eof()
        except (OSError, RuntimeError):  # already disconnected
            self._transport.abort()

    def abort(self) -> None:
        """Close the connection immediately; pending bytes are lost."""
        self._end(None)
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        address = transport.get_extra_info("peername") or ("unknown", 0)
        self.peer_name = f"{address[0]}:{address[1]}"
        self._transport.set_write_buffer_limits(high=self._limits.high_water_bytes)
        self._slow_reader = SlowReader(self._transport, self._limits.stall_s, self._on_cut)
        self._connections.add(self)
        num, most = len(self._connections), self._limits.max_connections
        if num > most:
            if gets_refusal(num, most):
                self.refuse(WireError(ErrorCode.OVERLOADED, "too many connections"))
            else:
                self.abort()
            return
        self._handler = self._make_handler(self)
        self._read_timer = self._loop.call_later(self._limits.message_s, self._look_again)
        if self._slow_reader.is_sealed:
            self._look_timer = self._loop.call_later(LOOK_S, self._look)

    def data_received(self, data: bytes) -> None:
        if self.is_closing:
            return
        self._decoder.receive(data)
        self._take_messages()

    def _take_messages(self) -> None:
        """Handle received messages, at most `MAX_AT_ONCE` before other connections are served."""
        num_taken = 0
        try:
            while not self.is_closing and (message := self._decoder.next_message()) is not None:
                self._message_began_at = self._last_look_at = None
                self._traffic.received[message.tag] += 1
                if self._handler is not None:
                    self._handler.on_message(message)
                num_taken += 1
                if num_taken == MAX_AT_ONCE:
                    self._transport.pause_reading()
                    self._loop.call_soon(self._go_on)
                    break
        except WireError as error:
            self.refuse(error)
        except Exception:
            _LOG.exception("handler failed", peer=self.peer_name)
            self.refuse(WireError(ErrorCode.INTERNAL, "internal error"))
        self._watch_rate()

    def _go_on(self) -> None:
        if self._transport.is_closing():
            return
        self._transport.resume_reading()
        self._take_messages()

    def _look(self) -> None:
        """Close the connection if a TLS client has disconnected, which asyncio does not report."""
        if has_left(self._transport):
            self.eof_received()
        else:
            self._look_timer = self._loop.call_later(LOOK_S, self._look)

    def eof_received(self) -> bool:
        self._write()
        self._end(None)
        self._slow_reader.hang_up(self._limits.hang_up_s)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)
        self._connections.discard(self)
        self.closed.set_result(None)
        self._slow_reader.forget()

    def pause_writing(self) -> None:
        self._slow_reader.watch()

    def resume_writing(self) -> None:
        self._slow_reader.relax()

    def _watch_rate(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        if self.is_closing:
            return
        pending_bytes = self._decoder.buffered_bytes
        if not pending_bytes:
            self._read_timer = self._loop.call_later(self._limits.idle_s, self._on_silence)
            return
        if self._message_began_at is None:
            self._message_began_at = self._loop.time()
        allowed_s = self._limits.message_s + pending_bytes / self._limits.min_bytes_per_s
        if self._last_look_at is None:
            due = self._message_began_at + allowed_s
            self._read_timer = self._loop.call_at(due, self._look_again)
        else:  # the deadline has passed: further bytes do not extend it
            self._read_timer = self._loop.call_at(self._last_look_at, self._on_slow)

    def _look_again(self) -> None:
        self._last_look_at = self._loop.time() + LAST_LOOK_S
        self._read_timer = self._loop.call_at(self._last_look_at, self._on_slow)

    def _on_slow(self) -> None:
        self.refuse(RemoteProtocolError("the message did not arrive in time"))

    def _on_silence(self) -> None:
        is_busy = self._handler is not None and self._handler.is_busy
        since = self._loop.time() if is_busy else self._active_at
        due = since + self._limits.idle_s
        if due > self._loop.time():
            self._read_timer = self._loop.call_at(due, self._on_silence)
        else:  # read once more: the process may have been suspended
            self._read_timer = self._loop.call_later(LAST_LOOK_S, self._on_idle)

    def _on_idle(self) -> None:
        self.refuse(WireError(ErrorCode.DEADLINE_EXCEEDED, "idle for too long"))

    def _on_cut(self) -> None:
        self._on_slow_client()
        self._end(WireError(ErrorCode.DEADLINE_EXCEEDED, f"{self.peer_name} does not read"))

    def _end(self, error: Exception | None) -> None:
        if self.is_closing:
            return
        self.is_closing = True
        for timer in (self._read_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        if self._handler is not None:
            try:
                self._handler.on_closed(error)
            except Exception:
                _LOG.exception("handler failed", peer=self.peer_name)
            self._handler = None  # breaks a reference cycle


class Server:
    """A listening server; `port` is the port it is bound to."""

    def __init__(
        self, listener: Listener, sock: socket.socket, connections: set[Connection]
    ) -> None:
        self._listener = listener
        self._connections = connections
        self.host, self.port = sock.getsockname()[:2]
        # The descriptor of the listening socket, to inherit by another process.
        self.listener = sock.fileno()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def is_answering(self) -> bool:
        """Whether any client has pending bytes."""
        return any(connection.buffered_bytes for connection in self._connections)

    def stop_accepting(self) -> None:
        """Leave new connections to a process that has inherited the listening socket."""
        self._listener.stop_accepting()

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop accepting, close all connections, and abort those still open after `grace_s`."""
        self._listener.close()
        for connection in list(self._connections):
            connection.close()
        closing = [connection.closed for connection in self._connections]
        if closing and grace_s:
            await asyncio.wait(closing, timeout=grace_s)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.gather(*closing)
        await self._listener.wait_closed()


async def serve(
    host: str,
    port: int,
    make_handler: Callable[[Connection], Handler],
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
    traffic: Traffic | None = None,
    *,
    is_shared: bool = False,
    inherited: socket.socket | None = None,
    on_slow_client: Callable[[], object] = lambda: None,
) -> Server:
    """Listen on `host`:`port` (0: any free port), with a handler per client.  Raises OSError.

    For `is_shared` see `bind`; `inherited` is a listening socket to use instead.  `on_slow_client`
    is called for each slow reader that is reset.
    """
    connections: set[Connection] = set()
    fair_writes = FairWrites()
    allowed = limits or Limits()
    counts = traffic or Traffic()
    sock = inherited or bind(host, port, is_shared=is_shared)
    listener = await listen(
        lambda: Connection(make_handler, allowed, connections, counts, fair_writes, on_slow_client),
        sock,
        tls,
        handshake_s=allowed.message_s,
        max_handshakes=allowed.max_connections,
    )
    return Server(listener, sock, connections)
