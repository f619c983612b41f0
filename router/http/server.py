"""The HTTP server: uvicorn on the router's event loop, with limits that uvicorn lacks.

    headers      at most MAX_HEADERS and MAX_HEADER_BYTES.  They must be complete within `grace_s`
                 after the connection was opened, or, for a later request, after their first byte
                 or the end of the previous response
    framing      requests that another server might interpret differently get 400
    bodies       the application reads them; what arrives after its response is discarded
    responses    slow readers are disconnected (`wire.aio.slow_readers`); HTTP/1.0 clients, which do
                 not support chunks, get a stream that ends with the connection
    connections  above `max_connections`, new connections get 503 with Retry-After, or are just
                 closed if there are too many; concurrent TLS handshakes have the same limit

Only this file, `router.http.framing` and `router.http.transport` use undocumented parts of uvicorn.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.api.errors import HttpError, retry_after
from router.http.framing import (
    HeadBuffer,
    Parser,
    error_response,
    framing_problem,
    unchunked,
)
from router.http.transport import LingeringTransport
from wire.aio.listener import LAST_LOOK_S, Listener, bind, gets_refusal, listen
from wire.aio.slow_readers import STALL_S, SlowReader, has_left
from wire.errors import ErrorCode

MAX_HEADER_BYTES: Final = 64 << 10
# 64 KiB may hold 13,000 short headers, which would block the event loop for 40 ms.
MAX_HEADERS: Final = 256
_TOO_MANY: Final = (431, f"there are over {MAX_HEADERS} headers", "headers_too_large")
_TOO_LARGE: Final = (431, f"the headers are over {MAX_HEADER_BYTES} bytes", "headers_too_large")
# A body that arrives byte by byte takes the loop forty times as long as in one chunk.
SMALL_CHUNK, MAX_SMALL_CHUNKS = 64, 4096
# When the router stops, it waits this long for written bytes to be sent.
FLUSH_S: Final = 2.0
# The most requests of one connection that may wait for earlier responses.
MAX_PIPELINED: Final = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on HTTP clients.

    `idle_s` is the timeout between two requests.  Clients close idle connections earlier (httpx and
    openai after 5 s): if the server closed first, it might do so just as a request is being sent.
    `stall_s` is the timeout for slow readers, `flush_s` the one for closing (`LingeringTransport`).
    """

    max_connections: int = 4096
    grace_s: float = 5.0
    idle_s: float = 120.0
    flush_s: float = FLUSH_S
    stall_s: float = STALL_S


class GuardedProtocol(HttpToolsProtocol):
    """The protocol of one HTTP connection.

    `_num_pending` requests have no complete response yet.  If invalid bytes follow them, the error
    is sent after those responses, so that none of them is truncated.
    """

    # These are slots, because uvicorn's attributes are in the instance's dict already: with over 30
    # names in it, CPython no longer shares the table of names between connections (1.2 kB each).
    __slots__ = (
        "_has_started",
        "_header_bytes",
        "_is_in_body",
        "_is_in_headers",
        "_is_resuming",
        "_num_pending",
        "_num_small",
        "_parse_error",
        "_pending_error",
        "_running",
        "_timer",
    )
    limits = Limits()
    on_slow_client: Callable[[], object] = staticmethod(lambda: None)
    # Responses to new requests close their connection: clients come back to another process.
    is_retiring = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # After an upgrade offer, a new parser is being fed the framing headers again.
        self._is_resuming = False
        self._timer: asyncio.TimerHandle | None = None
        self._num_pending = 0
        # Whether the next bytes are headers, and whether the first of them was received.
        self._is_in_headers, self._has_started = True, False
        self._is_in_body = False
        self._header_bytes = self._num_small = 0
        self._parse_error = (400, "this is not HTTP/1.1", "invalid_http")
        # The error to send once no response is pending.  While it is set, nothing more is read.
        self._pending_error: HttpError | None = None
        # The request that is being processed; `cycle` is the latest request.
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.parser = Parser(self)
        slow_reader = SlowReader(transport, self.limits.stall_s, self.on_slow_client)
        lingering = LingeringTransport(self, transport, slow_reader, self.limits.flush_s)
        super().connection_made(cast(asyncio.Transport, lingering))
        self._start_timer()
        num, most = len(self.connections), self.limits.max_connections
        if num > most and gets_refusal(num, most):
            self._refuse(503, "too many connections", ErrorCode.OVERLOADED.label)
        elif num > most:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._disconnect_running()  # uvicorn notifies only the latest request
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn does not after a reset
        # Pipelined requests refer to this connection: break the cycle, for the garbage collector.
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]
        cast(LingeringTransport, self.transport).forget()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        cast(LingeringTransport, self.transport).slow_reader.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        cast(LingeringTransport, self.transport).slow_reader.relax()

    def eof_received(self) -> None:
        """Treat EOF as a disconnect; the loop closes the transport once buffered data is read."""
        slow_reader = cast(LingeringTransport, self.transport).slow_reader
        slow_reader.hang_up(self.limits.flush_s)
        if slow_reader.is_sealed:  # over TLS, later writes are discarded
            self._disconnect_running()

    def poll_disconnect(self) -> None:
        """Detect a disconnect that the event loop does not report: while reading is paused for a
        pipelined request, or over TLS without close_notify while bytes are buffered."""
        transport = cast(LingeringTransport, self.transport)
        is_unreported = self.flow.read_paused or transport.slow_reader.is_sealed
        if is_unreported and not transport.is_closing() and has_left(transport.inner):
            self.eof_received()
            transport.close()

    def _disconnect_running(self) -> None:
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()

    @property
    def is_answering(self) -> bool:
        """Whether part of a response was not passed to the kernel yet."""
        return bool(self._num_pending or self.transport.get_write_buffer_size())

    @property
    def may_have_unread(self) -> bool:
        """Whether the client may be sending bytes that will not be read."""
        return self._is_in_body or self._pending_error is not None

    def data_received(self, data: bytes) -> None:
        if self._pending_error is not None or self.transport.is_closing():
            return
        self._header_bytes += len(data)
        super().data_received(data)
        if self._pending_error is not None or not self._is_in_headers:
            return
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(*_TOO_LARGE)
        elif not self._num_pending and self._timer is None:
            self._start_timer()

    def resume(self, rest: bytes) -> None:
        """Ignore an upgrade offer and continue in HTTP/1.1.

        The parser considers the message complete, so feed a new parser the framing headers again.
        """
        framing = (b"content-length", b"transfer-encoding")
        lines = [b"%s: %s\r\n" % header for header in self.headers if header[0] in framing]
        self.parser = Parser(self)
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
                self._fail_parsing(*_TOO_MANY)
            super().on_header(name, value)
            return
        # A trailer: it is counted, but not kept.
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > MAX_HEADER_BYTES:
            self._fail_parsing(400, f"the trailers are over {MAX_HEADER_BYTES} bytes")

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            self._is_resuming = False
            return
        self._stop_timer()
        # `_header_bytes` also counts other bytes of the same reads, so sum up the headers.
        lines_bytes = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.url) + lines_bytes > MAX_HEADER_BYTES:
            self._fail_parsing(*_TOO_LARGE)
        if problem := framing_problem(self.headers, self.parser.get_http_version()):
            self._fail_parsing(400, problem)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail_parsing(400, f"over {MAX_PIPELINED} requests wait on this connection")
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # 1.0 clients take it for the response
            self.app = unchunked(self.config.loaded_app)
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":  # a response to HEAD is only a head
            self.cycle.transport = cast(asyncio.Transport, HeadBuffer(self.cycle))
        if self.is_retiring:
            self.cycle.keep_alive = False
        self._num_pending += 1
        self._is_in_headers, self._has_started, self._is_in_body = False, False, True
        self._header_bytes = self._num_small = 0

    def on_body(self, body: bytes) -> None:
        self._num_small += len(body) < SMALL_CHUNK
        if self._num_small > MAX_SMALL_CHUNKS:
            self._fail_parsing(
                400, f"the body has over {MAX_SMALL_CHUNKS} pieces of under {SMALL_CHUNK} B"
            )
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the body is parsed by `resume`
        self._is_in_headers, self._is_in_body, self._header_bytes = True, False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Continue with the pending error or the next request, or close the connection."""
        self._num_pending -= 1
        super().on_response_complete()
        if self._num_pending or self.transport.is_closing():
            return
        if self._is_in_body:  # the rest of the request body will not be read
            self.transport.close()
        elif self._pending_error is not None:
            self._send_error(self._pending_error)
        elif self._has_started:  # the next request has started already
            self._unset_keepalive_if_required()
            self._start_timer()
        else:
            self._header_bytes = 0  # an empty line after a body is common and harmless

    def timeout_keep_alive_handler(self) -> None:
        # Stored as uvicorn's own timer, which it cancels when bytes arrive.
        self.timeout_keep_alive_task = self.loop.call_later(LAST_LOOK_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._parse_error)

    def _fail_parsing(self, status: int, problem: str, code: str = "invalid_http") -> NoReturn:
        """Make the parser fail with this error: uvicorn then calls `send_400_response`."""
        self._parse_error = (status, problem, code)
        raise ValueError(problem)

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Stop reading, send an error once no response is pending, and close."""
        self._stop_timer()
        headers = (retry_after(),) if status == 503 else ()
        self._pending_error = HttpError(status, message, code=code, headers=headers)
        if self._is_in_body:
            self._drop_body()
        if not self._num_pending:
            self._send_error(self._pending_error)

    def _drop_body(self) -> None:
        """Drop the request whose body is incomplete, unless its response has started."""
        if self.pipeline:
            self.pipeline.popleft()
        elif self.cycle.response_started:
            return
        else:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._num_pending -= 1
        self._is_in_body = False

    def _send_error(self, refusal: HttpError) -> None:
        self.transport.write(error_response(refusal))
        self.transport.close()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.limits.grace_s, self._extend_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _extend_timer(self) -> None:
        self._timer = self.loop.call_later(LAST_LOOK_S, self._on_slow)

    def _on_slow(self) -> None:
        self._timer = None
        self._refuse(408, "the headers came too slowly", "header_timeout")


class HttpServer(uvicorn.Server):
    """uvicorn on the running event loop.  It binds its socket at once and handles no signals."""

    def __init__(
        self,
        app: object,
        host: str,
        port: int,
        limits: Limits,
        tls: ssl.SSLContext | None,
        *,
        is_shared: bool = False,
        inherited: socket.socket | None = None,
        on_slow_client: Callable[[], object] = lambda: None,
    ) -> None:
        settings = {"limits": limits, "on_slow_client": staticmethod(on_slow_client)}
        guarded = cast(type[GuardedProtocol], type("Guarded", (GuardedProtocol,), settings))
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
        self._socket = inherited or bind(host, port, is_shared=is_shared)
        # The descriptor of the listening socket, to inherit by another process.
        self.listener = self._socket.fileno()
        self.host, self.port = self._socket.getsockname()[:2]

    @property
    def is_answering(self) -> bool:
        """Whether any response was not sent completely."""
        return any(connection.is_answering for connection in self._connections())

    def stop_accepting(self) -> None:
        """Leave new connections to a process that has inherited the listening socket.

        The response to the next request of each connection closes it.
        """
        self._guarded.is_retiring = True
        for server in self.servers:
            cast(Listener, server).stop_accepting()

    def _connections(self) -> tuple[GuardedProtocol, ...]:
        return tuple(cast(set[GuardedProtocol], self.server_state.connections))

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, with a limit on TLS handshakes that uvicorn's own listener lacks."""
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
        """Poll for disconnects once a second; uvicorn calls this ten times a second."""
        if counter % 10 == 0:
            for connection in self._connections():
                connection.poll_disconnect()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections; abort those that are still open after `flush_s`."""
        for connection in self._connections():
            connection.loop.call_later(self._limits.flush_s, connection.transport.abort)
        await super().shutdown(sockets)

    async def run_on_loop(self) -> None:
        """Serve until `should_exit`."""
        await self.serve(sockets=[self._socket])
