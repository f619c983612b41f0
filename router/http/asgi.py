"""One HTTP request as ASGI delivers it; bodies are read in `router.http.limits`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from types import coroutine
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct, field

from router.api.errors import ErrorBody, Header, HttpError, openai_error
from wire.process.api_keys import ApiKeys, bearer, digest, name_of

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
# Appends to a body; returns False if it would have to wait.
Push = Callable[[bytes], bool]

T = TypeVar("T")

JSON: Final = b"application/json"
# Whole responses are sent in chunks, so that little is buffered for a slow reader.
PIECE_BYTES: Final = 256 << 10
# Request ids come from clients and go into the log.
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9_.:=+/-]{1,128}")
# W3C Trace Context: version, trace, parent and flags; later versions may append fields.
_TRACEPARENT: Final = re.compile(
    rb"(?!ff)([0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-[!-~]*)?"
)
_TRACESTATE: Final = re.compile(rb"[ -~]{1,512}")


class Disconnected(Exception):
    """The client left, or was cut off as a slow reader."""


def find_header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header of this lower-case name."""
    for key, value in scope["headers"]:  # a generator would take twice as long
        if key == name:
            return bytes(value)
    return None


def request_id(scope: Scope, fresh: str) -> str:
    """Return the client's x-request-id if it is one we may log and echo, else `fresh`."""
    given = find_header(scope, b"x-request-id")
    return given.decode("ascii") if given and _REQUEST_ID.fullmatch(given) else fresh


def trace(scope: Scope) -> dict[str, str]:
    """Return `traceparent` and `tracestate` if they follow W3C Trace Context."""
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


def check_api_key(scope: Scope, api_keys: ApiKeys) -> str:
    """Return the name of the request's API key, in OpenAI's header or Anthropic's.

    Raises:
        HttpError: 401.
    """
    headers = (bearer(find_header(scope, b"authorization")), find_header(scope, b"x-api-key"))
    keys = [key for key in headers if key]
    for key in keys:
        if api_keys.allow(known := digest(key)):
            return name_of(known)
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
    """Send a whole response."""
    described = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": described})
    last = max(len(body) - 1, 0) // PIECE_BYTES * PIECE_BYTES
    for start in range(0, last, PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": body[last:]})


class HttpExchange(Struct, eq=False):
    """A request and its result; `started_at` is on the monotonic clock.

    `status`, `outcome` and `facts` are for its line in the log.
    """

    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    started_at: float
    endpoint: str = "unknown"
    # The route needs no API key.
    is_open: bool = False
    # The text in the path for the route's name in braces.
    named: str = ""
    status: int = 200
    outcome: str = "ok"
    key_name: str = ""
    # The whole body was received.
    is_body_read: bool = False
    # A stream has started: an error can only be one more event.
    is_streaming: bool = False
    # Formats of an error, as a whole response and as the end of a stream.
    error_body: ErrorBody = openai_error
    failure: Callable[[HttpError], bytes] = lambda error: error.body
    # Headers that let an allowed web page read the response.
    cors: tuple[Header, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> tuple[Header, ...]:
        """Headers of every response, with the request id for OpenAI's and Anthropic's clients."""
        request_id = self.request_id.encode()
        return ((b"x-request-id", request_id), (b"request-id", request_id), *self.cors)

    @property
    def client(self) -> str:
        """The client's address, empty if unknown."""
        address = self.scope.get("client")
        return address[0] if address else ""

    @property
    def asker(self) -> str:
        """The identity for fair scheduling: the name of the API key, or the address."""
        return self.key_name or self.client

    async def unless_left(self, future: asyncio.Future[T]) -> T:
        """Await a future, and cancel it if the client leaves or the caller is cancelled.

        Raises:
            Disconnected: The client left before.
        """
        leaving = asyncio.create_task(self.until_disconnected())
        try:
            await asyncio.wait((future, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise Disconnected
            return future.result()
        finally:
            leaving.cancel()
            future.cancel()

    async def until_disconnected(self) -> None:
        """Wait for the client to leave; the body must have been read whole."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self, status: int, body: bytes, *headers: Header, content_type: bytes = JSON
    ) -> None:
        """Send a whole response."""
        self.status = status
        named = {name: (name, value) for name, value in (*self.headers, *headers)}
        if not self.is_body_read and has_body(self.scope):
            # The server closes a connection with an unread body: the client must not reuse it.
            named |= {b"connection": (b"connection", b"close")}
        all_headers = tuple(named.values())
        await respond(self.send, status, body, content_type=content_type, headers=all_headers)

    async def reply(self, body: object, status: int = 200, *headers: Header) -> None:
        """Send a whole JSON response."""
        await self.respond(status, msgspec.json.encode(body), *headers)


@coroutine
def resume(started: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Run a coroutine to its end that was started by `send(None)` and then awaited `awaited`.

    Most of these finish in that first step, and then cost neither a task nor a timer.
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
