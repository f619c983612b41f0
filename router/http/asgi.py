"""One HTTP request as ASGI hands it over, and the errors it may be answered with.

`HttpExchange` goes with a request from its first header to its line in the log.  Errors have the
shape that OpenAI clients parse.  Knows nothing of completions, and waits for nothing but ASGI's own
callables; bodies are read in `router.http.limits`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from wire.errors import ErrorCode, WireError
from wire.process.api_keys import ApiKeys, bearer, digest, name_of

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON: Final = b"application/json"
# Seconds that the client is told to wait before it asks again.
RETRY_AFTER_S: Final = 1
# Request ids come from outside and go into our logs.
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9_.:=+/-]{1,128}")

HTTP_STATUS: Final[dict[ErrorCode, int]] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.KV_TRANSFER_TOO_LARGE: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.DEADLINE_EXCEEDED: 408,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.NO_WORKER: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.WORKER_LOST: 503,
    ErrorCode.OUT_OF_BLOCKS: 503,
}


class Disconnected(Exception):
    """The client went away, or was cut off because it did not read; nobody is left to answer."""


class HttpError(Exception):
    """The request is answered with an error.  `code` is a word that a program can test for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: tuple[Header, ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers

    @property
    def body(self) -> bytes:
        """The JSON object, for a response as for an event in the middle of a stream."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": _type(self.status),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def _type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def http_error(error: WireError) -> HttpError:
    """Return what a client is told of an error of the system.

    An error that is not in HTTP_STATUS is a fault of ours: the client is told its code alone.
    """
    status = HTTP_STATUS.get(error.code, 500)
    headers: tuple[Header, ...] = ()
    if status in (429, 503):
        headers = (retry_after(),)
    elif status == 408 or error.code is ErrorCode.MODEL_FAILED:
        # The deadline has passed, or the model cannot; clients that retry 408 and 500 by themselves
        # would only add load.
        headers = ((b"x-should-retry", b"false"),)
    message = error.message if status != 500 else f"the request failed: {error.code.label}"
    return HttpError(status, message, code=error.code.label, headers=headers)


def retry_after() -> Header:
    """Return the header of an error that may be over when the client asks again."""
    return b"retry-after", b"%d" % RETRY_AFTER_S


def find_header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header of this lower-case name."""
    return next((value for key, value in scope["headers"] if key == name), None)


def request_id(scope: Scope, fresh: str) -> str:
    """Return the client's x-request-id if it is one we may log and echo, else `fresh`."""
    given = find_header(scope, b"x-request-id")
    return given.decode("ascii") if given and _REQUEST_ID.fullmatch(given) else fresh


def has_body(scope: Scope) -> bool:
    """Whether the request says that a body comes with it."""
    length = find_header(scope, b"content-length") or b"0"
    return length != b"0" or find_header(scope, b"transfer-encoding") is not None


def check_api_key(scope: Scope, api_keys: ApiKeys) -> str:
    """Return the name of the request's key, or refuse it; its body is not read.

    Raises:
        HttpError: 401.
    """
    key = bearer(find_header(scope, b"authorization"))
    if not api_keys.allow(known := digest(key)):
        said = "this API key is not valid" if key else "there is no API key in the request"
        raise HttpError(
            401,
            f"{said}: send Authorization: Bearer KEY",
            code="invalid_api_key",
            headers=((b"www-authenticate", b"Bearer"), (b"connection", b"close")),
        )
    return name_of(known)


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
    await send({"type": "http.response.body", "body": body})


@dataclass(eq=False, slots=True)
class HttpExchange:
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
    status: int = 200
    outcome: str = "ok"
    key_name: str = ""
    # The whole body was received.
    is_body_read: bool = False
    # The first events of a stream were sent: an error can only be one more event.
    is_streaming: bool = False
    # Headers that let a web page on the list of allowed ones read the answer.
    cors: tuple[Header, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> tuple[Header, ...]:
        """Headers of every response."""
        return ((b"x-request-id", self.request_id.encode()), *self.cors)

    @property
    def client(self) -> str:
        """The address of the other end, empty when the server does not say."""
        address = self.scope.get("client")
        return address[0] if address else ""

    @property
    def asker(self) -> str:
        """Who takes turns with the others that wait: an API key, or without keys an address."""
        return self.key_name or self.client

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
