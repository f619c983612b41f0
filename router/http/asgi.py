"""One HTTP request as ASGI hands it over.

`HttpExchange` goes with a request from its first header to its line in the log.  Knows nothing of
completions, and waits for nothing but ASGI's own callables and what `unless_left` is given; bodies
are read in `router.http.limits`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct, field

from router.api.errors import ErrorBody, Header, HttpError, openai_error
from wire.process.api_keys import ApiKeys, bearer, digest, name_of

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
# Takes a piece of a body, or says False: it would have to wait.
Push = Callable[[bytes], bool]

T = TypeVar("T")

JSON: Final = b"application/json"
# A whole answer is sent in pieces of this size: no more of it waits for a slow client than the
# server lets wait, and one piece.
PIECE_BYTES: Final = 256 << 10
# Request ids come from outside and go into our logs.
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9_.:=+/-]{1,128}")
# W3C Trace Context: version, trace, parent and flags.  Later versions may say more after them.
_TRACEPARENT: Final = re.compile(
    rb"(?!ff)([0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-[!-~]*)?"
)
_TRACESTATE: Final = re.compile(rb"[ -~]{1,512}")


class Disconnected(Exception):
    """The client went away, or was cut off because it did not read; nobody is left to answer."""


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
    """Return `traceparent` and `tracestate` if they are such as W3C Trace Context has them."""
    parents = [value for key, value in scope["headers"] if key == b"traceparent"]
    parent = _TRACEPARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if parent is None or (parent[2] and parent[1].startswith(b"00")):
        return {}
    states = [value for key, value in scope["headers"] if key == b"tracestate"]
    state = _TRACESTATE.fullmatch(b",".join(states))
    found = {"traceparent": parent[1], "tracestate": state[0] if state else b""}
    return {name: value.decode("ascii") for name, value in found.items() if value}


def has_body(scope: Scope) -> bool:
    """Whether the request says that a body comes with it."""
    length = find_header(scope, b"content-length") or b"0"
    return length != b"0" or find_header(scope, b"transfer-encoding") is not None


def check_api_key(scope: Scope, api_keys: ApiKeys) -> str:
    """Return the name of the request's key, or refuse it; its body is not read.

    A key may be in either header that clients put it in, of OpenAI and of Anthropic.

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
    described = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(body)),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": described})
    # In pieces, of which the server takes the next when the client has taken those before.
    last = max(len(body) - 1, 0) // PIECE_BYTES * PIECE_BYTES
    for start in range(0, last, PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": body[last:]})


class HttpExchange(Struct, eq=False):
    """A request and what became of it; `started_at` is on the monotonic clock.

    `key_name` names its API key, where there are keys; `status`, `outcome` and `facts` are for its
    line in the log.
    """

    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    started_at: float
    endpoint: str = "unknown"
    # Answered without an API key.
    is_open: bool = False
    # What the path says where its route has a name in braces.
    named: str = ""
    status: int = 200
    outcome: str = "ok"
    key_name: str = ""
    # The whole body was received.
    is_body_read: bool = False
    # The first events of a stream were sent: an error can only be one more event.
    is_streaming: bool = False
    # How an error is said in an answer of its own, and how in a stream that breaks.
    error_body: ErrorBody = openai_error
    failure: Callable[[HttpError], bytes] = lambda error: error.body
    # Headers that let a web page on the list of allowed ones read the answer.
    cors: tuple[Header, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> tuple[Header, ...]:
        """Headers of every response.  OpenAI's clients read the one id, Anthropic's the other."""
        request_id = self.request_id.encode()
        return ((b"x-request-id", request_id), (b"request-id", request_id), *self.cors)

    @property
    def client(self) -> str:
        """The address of the other end, empty when the server does not say."""
        address = self.scope.get("client")
        return address[0] if address else ""

    @property
    def asker(self) -> str:
        """The key for fair scheduling: an API key, or without keys an address."""
        return self.key_name or self.client

    async def unless_left(self, future: asyncio.Future[T]) -> T:
        """Await a future; it is cancelled if nobody waits for it any more.

        Raises:
            Disconnected: The client left before.
        """
        leaving = asyncio.create_task(self._wait_for_disconnect())
        try:
            await asyncio.wait((future, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise Disconnected
            return future.result()
        finally:
            leaving.cancel()
            future.cancel()

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self, status: int, body: bytes, *headers: Header, content_type: bytes = JSON
    ) -> None:
        """Send a whole response."""
        self.status = status
        named = {name: (name, value) for name, value in (*self.headers, *headers)}
        if not self.is_body_read and has_body(self.scope):
            # The server hangs up on a body that nobody reads: the client must not ask here again.
            named |= {b"connection": (b"connection", b"close")}
        all_headers = tuple(named.values())
        await respond(self.send, status, body, content_type=content_type, headers=all_headers)

    async def reply(self, body: object, status: int = 200, *headers: Header) -> None:
        """Send a whole response of JSON."""
        await self.respond(status, msgspec.json.encode(body), *headers)


async def lifespan(receive: Receive, send: Send) -> None:
    """Answer the server's start and stop; there is nothing to prepare."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
