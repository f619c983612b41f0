"""The transport of an HTTP connection: closes without losing bytes, cuts, and writes past ASGI."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.http.asgi import Push, Send
from router.http.framing import HeadBuffer
from wire.aio.slow_readers import SlowReader


class Reading(Protocol):
    """The protocol of a connection, which may leave bytes of the client unread."""

    flow: FlowControl

    @property
    def may_have_unread(self) -> bool: ...


class LingeringTransport:
    """A transport whose `close` lingers while the client may still be sending.

    Closing a socket with unread bytes resets the connection, and the client may lose the response.
    So the router first sends EOF, and discards incoming bytes until the client sends EOF too, or
    until `flush_s` after it has received everything.
    """

    __slots__ = ("_flush_s", "_is_closing", "_protocol", "inner", "slow_reader")

    def __init__(
        self,
        protocol: Reading,
        transport: asyncio.Transport,
        slow_reader: SlowReader,
        flush_s: float,
    ) -> None:
        self.inner = transport
        self.slow_reader = slow_reader
        self._protocol = protocol
        self._flush_s = flush_s
        self._is_closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def is_closing(self) -> bool:
        return self._is_closing or self.inner.is_closing()

    def forget(self) -> None:
        """Drop references after the connection was lost."""
        self.slow_reader.forget()
        self._is_closing = True
        del self._protocol

    def close(self) -> None:
        """Send the buffered bytes, then close."""
        if self.is_closing():
            return
        self._is_closing = True
        self.slow_reader.hang_up(self._flush_s)
        if not (self._protocol.may_have_unread and self.inner.can_write_eof()):
            self.inner.close()
            return
        try:
            self.inner.write_eof()
            self._protocol.flow.resume_reading()
        except (OSError, RuntimeError):  # the connection is lost already
            self.inner.abort()


def cut(send: Send) -> None:
    """Reset the connection without sending buffered bytes, which ASGI cannot express.

    This works because uvicorn's `send` is a method of the object that has the transport.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if isinstance(transport, (LingeringTransport, HeadBuffer)):
        transport.slow_reader.cut()


def find_push(send: Send) -> Push | None:
    """Return a function that appends to a started response body without ASGI, or None.

    With an ASGI event, a coroutine and uvicorn's bookkeeping a token would cost twice as much.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or not cycle.chunked_encoding:
        return None
    transport = cycle.transport
    if isinstance(transport, HeadBuffer):
        return None  # the head was not written yet
    if isinstance(transport, LingeringTransport):
        transport = transport.inner  # saves a call for each token
    return partial(_push, transport)


def _push(transport: asyncio.Transport, body: bytes) -> bool:
    if transport.get_write_buffer_size():
        return False
    try:
        transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    except RuntimeError:  # the transport is closed
        return False
    return True
