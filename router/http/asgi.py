"""One HTTP request received over ASGI.  `router.http.limits` reads its body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from types import coroutine
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct, field

from router.api.errors import ErrorBody, Header, HttpError, openai_error
from wire.process.api_keys import ApiKeys, bearer, digest

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
# Appends to a response body; returns False, writing nothing, if the client reads too slowly.
Push = Callable[[bytes], bool]

T = TypeVar("T")

JSON: Final = b"application/json"
# The most bytes of a whole response that are sent at once, see `respond`.
CHUNK_BYTES: Final = 256 << 10
# Accepted x-request-id headers: clients send them, and they are written to the log.
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9_.:=+/-]{1,128}")
# W3C Trace Context: version, trace id, parent id and flags; later versions may append fields.
_TRACEPARENT: Final = re.compile(
    rb"(?!ff)([0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-[!-~]*)?"
)
_TRACESTATE: Final = re.compile(rb"[ -~]{1,512}")


class Disconnected(Exception):
    """The client disconnected, or was disconnected as a slow reader."""


def find_header(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of the first header with this lower-case name, or None."""
    for key, value in scope["headers"]:  # a generator would take twice as long
        if key == name:
            return bytes(value)
    return None


def request_id(scope: Scope, fresh: str) -> str:
    """Return the client's x-request-id if it is safe to log and echo, else `fresh`."""
    given = find_header(scope, b"x-request-id")
    return given.decode("ascii") if given and _REQUEST_ID.fullmatch(given) else fresh


def trace(scope: Scope) -> dict[str, str]:
    """Return those of `traceparent` and `tracestate` that are valid by W3C Trace Context."""
    parents = [value for key, value in scope["headers"] if key == b"traceparent"]
    parent = _TRACEPARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if parent is None or (parent[2] and parent[1].startswith(b"00")):
        return {}
    states = [value for key, value in scope["headers"] if key == b"tracestate"]
    state = _TRACESTATE.fullmatch(b",".join(states))
    found = {"traceparent": parent[1], "tracestate": state[0] if state else b""}
    return {name: value.decode("ascii") for name, value in found.items() if value}


def has_body(scope: Scope) -> bool:
    """Whether the headers announce a body."""
    length = find_header(scope, b"content-length") or b"0"
    return length != b"0" or find_header(scope, b"transfer-encoding") is not None


def check_api_key(scope: Scope, api_keys: ApiKeys) -> bytes:
    """Check the API key in OpenAI's or Anthropic's header and return its digest.

    Raises:
        HttpError: 401.
    """
    headers = (bearer(find_header(scope, b"authorization")), find_header(scope, b"x-api-key"))
    keys = [key for key in headers if key]
    for key in keys:
        if api_keys.allow(known := digest(key)):
            return known
    said = "this API key is not valid" if keys else "there is no API key in the request"
    raise HttpError(
        401,
        f"{said}: send Authorization: Bearer KEY, or x-api-key: KEY",
        code="invalid_api_key",
        headers=((b"www-authenticate", b"Bearer"), (b"connection", b"close")),
    )


async def respond(
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: bytes = JSON,
    headers: tuple[Header, ...] = (),
) -> None:
    """Send a whole response, its body in chunks.

    `send` waits between them while a client reads slowly, so little of a large body is buffered.
    """
    described = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": described})
    last = max(len(body) - 1, 0) // CHUNK_BYTES * CHUNK_BYTES
    for start in range(0, last, CHUNK_BYTES):
        chunk = body[start : start + CHUNK_BYTES]
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": body[last:]})


class HttpExchange(Struct, eq=False):
    """An HTTP request and the state of its response.

    `started_at` is on the monotonic clock.  `status`, `outcome` and `facts` are for the log line.
    """

    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    started_at: float
    endpoint: str = "unknown"
    # The route needs no API key.
    is_open: bool = False
    # The text in the path that matched the name in braces of the route.
    named: str = ""
    status: int = 200
    outcome: str = "ok"
    key_name: str = ""
    # The cache salt for a request whose body sets the given one.
    cache_salt: Callable[[str], str] = str
    # Whether the API key is still valid.
    is_allowed: Callable[[], bool] = lambda: True
    # The whole request body was received.
    is_body_read: bool = False
    # A stream has started, so an error can only be sent as one more event.
    is_streaming: bool = False
    # Format an error as a whole response and as the last event of a stream.
    error_body: ErrorBody = openai_error
    failure: Callable[[HttpError], bytes] = lambda error: error.body
    # Headers that let an allowed web page read the response.
    cors: tuple[Header, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    # `traceparent` and `tracestate`: the client's, or one that the router made.
    trace: dict[str, str] = field(default_factory=dict)

    @property
    def traceparent(self) -> str | None:
        """The trace for workers, as of version 00 of Trace Context, with which later ones begin."""
        parent = self.trace.get("traceparent")
        return None if parent is None else "00" + parent[2:]

    @property
    def tags(self) -> dict[str, str]:
        """Return what names the request in a log line."""
        parent = self.trace.get("traceparent")
        trace_id = {} if parent is None else {"trace_id": parent.split("-")[1]}
        return {"request_id": self.request_id, **self.trace, **trace_id}

    @property
    def headers(self) -> tuple[Header, ...]:
        """The headers of every response: CORS headers and the request id under two names."""
        request_id = self.request_id.encode()
        return ((b"x-request-id", request_id), (b"request-id", request_id), *self.cors)

    @property
    def client(self) -> str:
        """The client's address, or "" if unknown."""
        address = self.scope.get("client")
        return address[0] if address else ""

    @property
    def client_id(self) -> str:
        """The name of the client's API key, or else its address; for fair scheduling."""
        return self.key_name or self.client

    @property
    def query(self) -> dict[str, str]:
        """The parameters after the path."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1")))

    async def while_connected(self, future: asyncio.Future[T]) -> T:
        """Await a future; cancel it if the client disconnects or the caller is cancelled.

        Raises:
            Disconnected: The client disconnected before the result.
        """
        disconnect = asyncio.create_task(self.until_disconnected())
        try:
            await asyncio.wait((future, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise Disconnected
            return future.result()
        finally:
            disconnect.cancel()
            future.cancel()

    async def until_disconnected(self) -> None:
        """Wait for the client to disconnect.  The request body must have been read completely."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self, status: int, body: bytes, *headers: Header, content_type: bytes = JSON
    ) -> None:
        """Send a whole response."""
        self.status = status
        named = {name: (name, value) for name, value in (*self.headers, *headers)}
        if not self.is_body_read and has_body(self.scope):
            # The server closes a connection with an unread body, so the client must not reuse it.
            named |= {b"connection": (b"connection", b"close")}
        all_headers = tuple(named.values())
        await respond(self.send, status, body, content_type=content_type, headers=all_headers)

    async def reply(self, body: object, status: int = 200, *headers: Header) -> None:
        """Send a whole JSON response."""
        await self.respond(status, msgspec.json.encode(body), *headers)


@coroutine
def resume(started: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Run a coroutine to its end after a first `send(None)`, which yielded `awaited`.

    Callers make that first step themselves, because most coroutines finish in it and then need
    neither a task nor a timer.
    """
    try:
        while True:
            try:
                yield awaited
            except BaseException as error:
                awaited = started.throw(error)
            else:
                awaited = started.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
