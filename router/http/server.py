"""The HTTP server: uvicorn on our loop, with the limits that uvicorn lacks.

    headers      at most MAX_HEADERS and MAX_HEADER_BYTES, complete within `grace_s` of the start of
                 the connection, of their first byte after a response, or of the response's end
    framing      requests that two servers might read differently get 400
    bodies       are read by the application; bytes after its response are discarded
    responses    slow readers are cut off (`wire.aio.slow_readers`); HTTP/1.0 clients, which do not
                 know chunks, get a stream that ends with the connection
    connections  at most `max_connections`; the next gets 503 and Retry-After, many more at a time
                 are just closed; as many TLS handshakes

Only this file and `router.http.framing` use uvicorn's undocumented parts.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.api.errors import HttpError, retry_after
from router.http.asgi import Push, Send
from router.http.framing import Beginning, error_response, framing_problem, unchunked
from wire.aio.listener import LAST_LOOK_S, bind, gets_refusal, listen
from wire.aio.slow_readers import STALL_S, SlowReader, has_left
from wire.errors import ErrorCode
from wire.parts import Buffer

MAX_HEADER_BYTES: Final = 64 << 10
# 64 KiB of the shortest headers are 13,000, which would take the loop 40 ms.
MAX_HEADERS: Final = 256
_TOO_MANY: Final = (431, f"there are over {MAX_HEADERS} headers", "headers_too_large")
_TOO_LARGE: Final = (431, f"the headers are over {MAX_HEADER_BYTES} bytes", "headers_too_large")
# A body that comes byte by byte takes the loop forty times as long as in one chunk.
SMALL_PIECE, MAX_SMALL_PIECES = 64, 4096
# When the router stops, written bytes have this long to be sent.
FLUSH_S: Final = 2.0
# Requests of one connection that may wait for earlier responses.
MAX_PIPELINED: Final = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on HTTP clients.

    `idle_s` is between two requests.  It is longer than clients keep idle connections (5 s in httpx
    and openai): if the server closed first, it might do so just as the next request is sent.
    `stall_s` is for slow readers, `flush_s` for closing (`LingeringTransport`).
    """

    max_connections: int = 4096
    grace_s: float = 5.0
    idle_s: float = 120.0
    flush_s: float = FLUSH_S
    stall_s: float = STALL_S


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    `_num_owed` requests have no complete response yet.  If the bytes after them are wrong, the
    error is sent after those responses, none of which is cut short.
    """

    # Slots, because uvicorn's own attributes are in the instance's dict: with over 30 names in it,
    # CPython gives every connection a table of all names, 1.2 kB each.
    __slots__ = (
        "_complaint",
        "_has_started",
        "_header_bytes",
        "_is_in_body",
        "_is_in_headers",
        "_is_resuming",
        "_num_owed",
        "_num_small",
        "_refusal",
        "_running",
        "_timer",
    )
    limits = Limits()
    on_slow_client: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # The parser is fed framing headers again after an upgrade offer.
        self._is_resuming = False
        self._timer: asyncio.TimerHandle | None = None
        self._num_owed = 0
        # The next bytes are headers; the first of them has come.
        self._is_in_headers, self._has_started = True, False
        self._is_in_body = False
        self._header_bytes = self._num_small = 0
        self._complaint = (400, "this is not HTTP/1.1", "invalid_http")
        # The error to send once nothing is owed.  While it is set, nothing more is read.
        self._refusal: HttpError | None = None
        # The request whose response is under way; `cycle` is the latest request.
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.parser = _Parser(self)
        super().connection_made(cast(asyncio.Transport, LingeringTransport(transport, self)))
        self._arm()
        num, most = len(self.connections), self.limits.max_connections
        if num > most and gets_refusal(num, most):
            self._refuse(503, "too many connections", ErrorCode.OVERLOADED.label)
        elif num > most:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._end_running()  # uvicorn tells only the latest request
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn does not after a reset
        # Pipelined requests refer to this connection: leave no cycle to the garbage collector.
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]
        cast(LingeringTransport, self.transport).forget()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        cast(LingeringTransport, self.transport).unread.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        cast(LingeringTransport, self.transport).unread.relax()

    def eof_received(self) -> None:
        """Take it that the client has gone; the loop closes once it has read what is buffered."""
        unread = cast(LingeringTransport, self.transport).unread
        unread.hang_up(self.limits.flush_s)
        if unread.is_sealed:  # later writes are discarded
            self._end_running()

    def look(self) -> None:
        """Notice that the client left where the loop does not report it: while reading is paused
        for a pipelined request, or over TLS without close_notify while bytes are buffered."""
        transport = cast(LingeringTransport, self.transport)
        is_untold = self.flow.read_paused or transport.unread.is_sealed
        if is_untold and not transport.is_closing() and has_left(transport.inner):
            self.eof_received()
            transport.close()

    def _end_running(self) -> None:
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()

    @property
    def is_answering(self) -> bool:
        """Whether part of a response is not with the kernel yet."""
        return bool(self._num_owed or self.transport.get_write_buffer_size())

    @property
    def may_have_unread(self) -> bool:
        """Whether the client may be sending bytes that are not read."""
        return self._is_in_body or self._refusal is not None

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return
        self._header_bytes += len(data)
        super().data_received(data)
        if self._refusal is not None or not self._is_in_headers:
            return
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(*_TOO_LARGE)
        elif not self._num_owed and self._timer is None:
            self._arm()

    def resume(self, rest: bytes) -> None:
        """Go on in HTTP/1.1 after an upgrade offer, which is ignored.

        The parser takes the message for complete, so a new one gets the framing headers again.
        """
        framing = (b"content-length", b"transfer-encoding")
        lines = [b"%s: %s\r\n" % header for header in self.headers if header[0] in framing]
        self.parser = _Parser(self)
        self._is_resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(lines))
        self.parser.feed_data(rest)

    def on_message_begin(self) -> None:
        if self._is_resuming:
            return
        self._has_started = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_resuming:
            return
        if not self._is_in_body:
            if len(self.headers) == MAX_HEADERS:
                self._complain(*_TOO_MANY)
            super().on_header(name, value)
            return
        # A trailer: counted, not kept.
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > MAX_HEADER_BYTES:
            self._complain(400, f"the trailers are over {MAX_HEADER_BYTES} bytes")

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            self._is_resuming = False
            return
        self._disarm()
        # `_header_bytes` counts whole reads, so count the headers themselves.
        lines_bytes = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.url) + lines_bytes > MAX_HEADER_BYTES:
            self._complain(*_TOO_LARGE)
        if problem := framing_problem(self.headers, self.parser.get_http_version()):
            self._complain(400, problem)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._complain(400, f"over {MAX_PIPELINED} requests wait on this connection")
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # it would take that for the response
            self.app = unchunked(self.config.loaded_app)
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":  # whose response is only a head
            self.cycle.transport = cast(asyncio.Transport, Beginning(self.cycle))
        self._num_owed += 1
        self._is_in_headers, self._has_started, self._is_in_body = False, False, True
        self._header_bytes = self._num_small = 0

    def on_body(self, body: bytes) -> None:
        self._num_small += len(body) < SMALL_PIECE
        if self._num_small > MAX_SMALL_PIECES:
            self._complain(
                400, f"the body has over {MAX_SMALL_PIECES} pieces of under {SMALL_PIECE} B"
            )
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its body comes now
        self._is_in_headers, self._is_in_body, self._header_bytes = True, False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._num_owed -= 1
        super().on_response_complete()
        if self._num_owed or self.transport.is_closing():
            return
        if self._is_in_body:  # its rest will not be read
            self.transport.close()
        elif self._refusal is not None:
            self._answer(self._refusal)
        elif self._has_started:  # the next request came during this response
            self._unset_keepalive_if_required()
            self._arm()
        else:
            self._header_bytes = 0  # an empty line after a body is common and harmless

    def timeout_keep_alive_handler(self) -> None:
        # Kept in uvicorn's own timer, which it cancels when bytes come.
        self.timeout_keep_alive_task = self.loop.call_later(LAST_LOOK_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._complaint)

    def _complain(self, status: int, problem: str, code: str = "invalid_http") -> NoReturn:
        """Make the parser stop, which makes uvicorn call `send_400_response`."""
        self._complaint = (status, problem, code)
        raise ValueError(problem)

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Send an error once nothing is owed, then close; nothing more is read."""
        self._disarm()
        headers = (retry_after(),) if status == 503 else ()
        self._refusal = HttpError(status, message, code=code, headers=headers)
        if self._is_in_body:
            self._give_up_body()
        if not self._num_owed:
            self._answer(self._refusal)

    def _give_up_body(self) -> None:
        """Drop the request whose body broke off, unless its response has started."""
        if self.pipeline:
            self.pipeline.popleft()
        elif self.cycle.response_started:
            return
        else:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._num_owed -= 1
        self._is_in_body = False

    def _answer(self, refusal: HttpError) -> None:
        self.transport.write(error_response(refusal))
        self.transport.close()

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.limits.grace_s, self._look_again)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_again(self) -> None:
        self._timer = self.loop.call_later(LAST_LOOK_S, self._on_slow)

    def _on_slow(self) -> None:
        self._timer = None
        self._refuse(408, "the headers came too slowly", "header_timeout")


class _Parser(httptools.HttpRequestParser):
    """Ignores upgrade offers."""

    def __init__(self, protocol: GuardedProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        # As in uvicorn: bytes after a request with "Connection: close" are no error.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Buffer) -> None:  # type: ignore[override]
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._protocol.resume(bytes(data)[offer.args[0] :])


class LingeringTransport:
    """A transport that closes in two steps while the client may still be sending.

    Closing a socket with unread bytes resets the connection, and the client may lose the response.
    So our side is ended first, and incoming bytes are discarded until the client ends its side or
    `flush_s` has passed since it read everything.
    """

    __slots__ = ("_is_closing", "_protocol", "inner", "unread")

    def __init__(self, transport: asyncio.Transport, protocol: GuardedProtocol) -> None:
        self.inner = transport
        self._protocol = protocol
        self._is_closing = False
        self.unread = SlowReader(transport, protocol.limits.stall_s, protocol.on_slow_client)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def is_closing(self) -> bool:
        return self._is_closing or self.inner.is_closing()

    def forget(self) -> None:
        """Drop references after the connection is lost."""
        self.unread.forget()
        self._is_closing = True
        del self._protocol

    def close(self) -> None:
        """Send what is buffered, then close."""
        if self.is_closing():
            return
        self._is_closing = True
        self.unread.hang_up(self._protocol.limits.flush_s)
        if not (self._protocol.may_have_unread and self.inner.can_write_eof()):
            self.inner.close()
            return
        try:
            self.inner.write_eof()
            self._protocol.flow.resume_reading()
        except (OSError, RuntimeError):  # it is gone already
            self.inner.abort()


class HttpServer(uvicorn.Server):
    """uvicorn on our loop: binds the socket at once and leaves signals alone."""

    def __init__(
        self,
        app: object,
        host: str,
        port: int,
        limits: Limits,
        tls: ssl.SSLContext | None,
        *,
        is_shared: bool = False,
        on_slow_client: Callable[[], object] = lambda: None,
    ) -> None:
        settings = {"limits": limits, "on_slow_client": staticmethod(on_slow_client)}
        guarded = type("Guarded", (GuardedProtocol,), settings)
        super().__init__(
            uvicorn.Config(
                cast(Any, app),
                loop="none",
                http=guarded,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=cast(int, limits.idle_s),
            )
        )
        self._guarded, self._limits, self._tls = guarded, limits, tls
        self._socket = bind(host, port, is_shared=is_shared)
        self.host, self.port = self._socket.getsockname()[:2]

    @property
    def is_answering(self) -> bool:
        """Whether a response has not been sent completely."""
        return any(connection.is_answering for connection in self._connections())

    def _connections(self) -> tuple[GuardedProtocol, ...]:
        return tuple(cast(set[GuardedProtocol], self.server_state.connections))

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with limits on TLS handshakes, which uvicorn's own listener lacks."""
        server = await listen(
            lambda: self._guarded(self.config, self.server_state, {}),
            self._socket,
            self._tls,
            handshake_s=self._limits.grace_s,
            max_handshakes=self._limits.max_connections,
        )
        self.servers = [cast(asyncio.Server, server)]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Look for clients that left, once a second; uvicorn calls this ten times as often."""
        if counter % 10 == 0:
            for connection in self._connections():
                connection.look()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections, and abort after `flush_s` those that are still open."""
        for connection in self._connections():
            connection.loop.call_later(self._limits.flush_s, connection.transport.abort)
        await super().shutdown(sockets)

    async def run_on_loop(self) -> None:
        """Serve until `should_exit`."""
        await self.serve(sockets=[self._socket])


def cut(send: Send) -> None:
    """Reset the connection without sending buffered bytes, which ASGI cannot express.

    uvicorn's `send` is a method of the cycle that holds the transport.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if isinstance(transport, (LingeringTransport, Beginning)):
        transport.unread.cut()


def find_push(send: Send) -> Push | None:
    """Return a function that appends to a started body without ASGI, or None.

    An ASGI event, a coroutine and uvicorn's bookkeeping would double the cost of a token.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or not cycle.chunked_encoding:
        return None
    transport = cycle.transport
    if isinstance(transport, Beginning):
        return None  # the head is not written yet
    if isinstance(transport, LingeringTransport):
        transport = transport.inner  # saves a call for each token
    return partial(_push, transport)


def _push(transport: asyncio.Transport, body: bytes) -> bool:
    if transport.get_write_buffer_size():
        return False
    try:
        transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    except RuntimeError:  # it is closed
        return False
    return True
