"""The HTTP server: uvicorn on our loop, with the limits that it does not have.

uvicorn has no time limit before a request is complete, no limit of its headers, and no limit of
connections that answers as an API should.  `GuardedProtocol` adds them around its protocol:

    headers      MAX_HEADERS within MAX_HEADER_BYTES, and complete within `grace_s`: from when the
                 connection began, from their first byte after an answer, or from its end
    framing      what two servers might read differently is answered 400
    bodies       are read by the application; what comes after its answer is thrown away
    answers      a client that does not read them is cut off (`wire.aio.slow_readers`); one of
                 HTTP/1.0, which knows no chunks, gets a stream until we hang up
    connections  `max_connections`; one more gets 503 and Retry-After, many more at a time nothing;
                 as many TLS handshakes

All that we know of uvicorn beyond its documentation is in this file and in `router.http.framing`.
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
from router.http.framing import Beginning, answered, framing_problem, unchunked
from wire.aio.listener import LAST_LOOK_S, bind, is_told, listen
from wire.aio.slow_readers import STALL_S, SlowReader, has_left
from wire.errors import ErrorCode
from wire.parts import Buffer

MAX_HEADER_BYTES: Final = 64 << 10
# 64 KiB of the shortest are 13,000, which would take the loop 40 ms.
MAX_HEADERS: Final = 256
_TOO_MANY: Final = (431, f"there are over {MAX_HEADERS} headers", "headers_too_large")
_TOO_LARGE: Final = (431, f"the headers are over {MAX_HEADER_BYTES} bytes", "headers_too_large")
# Pieces of a body that are hardly worth a call: a body of bytes that come one by one would take the
# loop forty times as long as the same in one piece.
SMALL_PIECE, MAX_SMALL_PIECES = 64, 4096
# When the router stops, what was written has this long to be sent.
FLUSH_S: Final = 2.0
# Requests that may wait for the answers of those before them, on one connection.
MAX_PIPELINED: Final = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one HTTP client.

    `idle_s` is between two requests.  It is longer than clients keep an idle connection (5 s, say
    httpx and openai): who hangs up first must not be us, just as they send the next request.
    `stall_s` is for clients that do not read, `flush_s` for hanging up: `LingeringTransport`.
    """

    max_connections: int = 4096
    grace_s: float = 5.0
    idle_s: float = 120.0
    flush_s: float = FLUSH_S
    stall_s: float = STALL_S


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    `_num_owed` requests are not answered to their end yet.  When the bytes after them are wrong,
    the client is told so after those answers, none of which is cut short.
    """

    # Not in the instance's dict, where uvicorn keeps its own: with over 30 names in it, CPython
    # gives every connection a table of all names, 1.2 kB each.
    __slots__ = (
        "_complaint",
        "_has_begun",
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
        # Whether the parser reads headers again that we have read already.
        self._is_resuming = False
        self._timer: asyncio.TimerHandle | None = None
        self._num_owed = 0
        # The next bytes are headers; the first of them has come.
        self._is_in_headers, self._has_begun = True, False
        self._is_in_body = False
        self._header_bytes = self._num_small = 0
        self._complaint = (400, "this is not HTTP/1.1", "invalid_http")
        # The error to answer with once nothing is owed.  When it is set, nothing more is read.
        self._refusal: HttpError | None = None
        # The request that is answered now; `cycle` is the one that came last.
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.parser = _Parser(self)
        super().connection_made(cast(asyncio.Transport, LingeringTransport(transport, self)))
        self._arm()
        num, most = len(self.connections), self.limits.max_connections
        if num > most and is_told(num, most):
            self._refuse(503, "too many connections", ErrorCode.OVERLOADED.label)
        elif num > most:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._end_running()  # uvicorn tells only the one that came last
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn does not where the client reset it
        # No circle is left for the garbage collector: requests that are never begun have us.
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
        """The client ends its side: it has gone, and our loop hangs up once it took what waits."""
        unread = cast(LingeringTransport, self.transport).unread
        unread.hang_up(self.limits.flush_s)
        if unread.is_sealed:  # what is written from here on is thrown away
            self._end_running()

    def look(self) -> None:
        """Notice a client that left, where the loop does not tell: while nothing of it is read, as
        uvicorn does not while a request waits for the answers of those before it; and over TLS
        while something waits for it, if it left without a good-bye."""
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
        """Whether a part of an answer is not with the kernel yet; over TLS, if it can be seen."""
        return bool(self._num_owed or self.transport.get_write_buffer_size())

    @property
    def may_have_unread(self) -> bool:
        """Whether the client may be sending bytes that nobody will read."""
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
        """Go on in HTTP/1.1 after headers that offer an upgrade, which we do not take.

        For the parser the message is over then; for us comes its body, as its headers say.
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
        self._has_begun = True
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
        # A trailer: nobody asks for it, so it is counted and not kept.
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > MAX_HEADER_BYTES:
            self._complain(400, f"the trailers are over {MAX_HEADER_BYTES} bytes")

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            self._is_resuming = False
            return
        self._disarm()
        # Of the read in which they end, only the parser knows how much is theirs.
        lines_bytes = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.url) + lines_bytes > MAX_HEADER_BYTES:
            self._complain(*_TOO_LARGE)
        if problem := framing_problem(self.headers, self.parser.get_http_version()):
            self._complain(400, problem)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._complain(400, f"over {MAX_PIPELINED} requests wait on this connection")
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # it would take that for the answer
            self.app = unchunked(self.config.loaded_app)
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":  # whose answer is but a head
            self.cycle.transport = cast(asyncio.Transport, Beginning(self.cycle))
        self._num_owed += 1
        self._is_in_headers, self._has_begun, self._is_in_body = False, False, True
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
        if self._is_in_body:  # nobody will read the rest of it
            self.transport.close()
        elif self._refusal is not None:
            self._answer(self._refusal)
        elif self._has_begun:  # the next request came while this one was answered
            self._unset_keepalive_if_required()
            self._arm()
        else:
            self._header_bytes = 0  # an empty line after a body is common, and means nothing

    def timeout_keep_alive_handler(self) -> None:
        # In uvicorn's own timer, which it cancels when something comes.
        self.timeout_keep_alive_task = self.loop.call_later(LAST_LOOK_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._complaint)

    def _complain(self, status: int, problem: str, code: str = "invalid_http") -> NoReturn:
        """Make the parser stop, which makes uvicorn call `send_400_response`."""
        self._complaint = (status, problem, code)
        raise ValueError(problem)

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer once nothing is owed, and hang up; nothing more is read."""
        self._disarm()
        headers = (retry_after(),) if status == 503 else ()
        self._refusal = HttpError(status, message, code=code, headers=headers)
        if self._is_in_body:
            self._give_up_body()
        if not self._num_owed:
            self._answer(self._refusal)

    def _give_up_body(self) -> None:
        """Drop the request whose body is broken off; one that has an answer already keeps it."""
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
        self.transport.write(answered(refusal))
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
    """Reads on where a client offers another protocol, as if it had not."""

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
    """A transport that, while the client may still be sending, closes in two steps.

    Closing a socket with bytes unread resets the connection, and the client may never see the
    answer that was written before.  So our side is ended first, and what comes is thrown away until
    the client ends its own, for `flush_s` after it took what waited.
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
        """The connection is gone."""
        self.unread.forget()
        self._is_closing = True
        del self._protocol

    def close(self) -> None:
        """Send what waits, then hang up."""
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
    """uvicorn on our loop: the socket is bound at once, signals are the process's business."""

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
        """Whether a client has not been sent all of its answer."""
        connections = cast(set[GuardedProtocol], self.server_state.connections)
        return any(connection.is_answering for connection in connections)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; uvicorn's own bounds neither the time nor the number of TLS handshakes."""
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
        """Look after clients once a second; uvicorn calls this ten times as often."""
        if counter % 10 == 0:
            for connection in tuple(cast(set[GuardedProtocol], self.server_state.connections)):
                connection.look()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Hang up; who does not take what is left, or over TLS our good-bye, is cut off then."""
        for connection in tuple(cast(set[GuardedProtocol], self.server_state.connections)):
            connection.loop.call_later(self._limits.flush_s, connection.transport.abort)
        await super().shutdown(sockets)

    async def run_on_loop(self) -> None:
        """Serve until `should_exit`."""
        await self.serve(sockets=[self._socket])


def cut(send: Send) -> None:
    """Reset the connection, unsent bytes included; nothing happens where this is not the server.

    ASGI has no word for it: a response cut short is closed only after its buffer was sent.
    uvicorn's `send` is a method of the cycle that holds the transport.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if isinstance(transport, (LingeringTransport, Beginning)):
        transport.unread.cut()


def find_push(send: Send) -> Push | None:
    """Return a way to add to a body that has begun, as `send` would; None where there is none.

    For every token of a stream: an event, a coroutine and uvicorn's own account of the response
    would take as long as all else that is done for it.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or not cycle.chunked_encoding:
        return None
    transport = cycle.transport
    if isinstance(transport, Beginning):
        return None  # it still has the head
    if isinstance(transport, LingeringTransport):
        transport = transport.inner  # by whose methods a token costs one call less each
    return partial(_push, transport)


def _push(transport: asyncio.Transport, body: bytes) -> bool:
    if transport.get_write_buffer_size():
        return False
    try:
        transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    except RuntimeError:  # it is closed
        return False
    return True
