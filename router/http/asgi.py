"""HTTP without a server: errors in the shape OpenAI clients parse, headers, bodies with a cap.

Works on ASGI's plain dicts and callables.  Knows nothing of completions, and reads no clock: the
gateway puts time limits around what is awaited here.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec

from wire.errors import ErrorCode, WireError
from wire.process.api_keys import ApiKeys, bearer, digest, name_of

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Header = tuple[bytes, bytes]
# Is told how much of a body has come; what it raises ends the reading.
OnBytes = Callable[[int], None]

JSON: Final = b"application/json"
# Half a million tokens as text, or 300,000 as decimal ids.  Reading JSON and dropping what the
# tokenizer made of a text hold the GIL: of 4 MB for longer than others should wait.
MAX_BODY_BYTES: Final = 2 * 1024 * 1024
# What the client is told to wait before it asks again: about one placement round.
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


class HttpError(Exception):
    """An answer that is not the one hoped for.  `code` is a word a program can test for."""

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

    Errors without a status of their own are ours to look into: their words stay in the log.
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
    """Return the header of answers that a later attempt may better."""
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


def check_content_type(scope: Scope) -> None:
    """Refuse bodies that do not say that they are plain JSON.

    Raises:
        HttpError: 415.
    """
    kind = find_header(scope, b"content-type") or b""
    if kind.split(b";")[0].strip().lower() != JSON:
        # A web page may send any other type to any host without asking first.
        raise HttpError(
            415,
            "send the header Content-Type: application/json (curl: -H 'content-type: "
            "application/json')",
            code="unsupported_media_type",
        )
    if (find_header(scope, b"content-encoding") or b"identity").lower() != b"identity":
        raise HttpError(415, "send the body uncompressed", code="unsupported_media_type")


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


async def read_body(
    scope: Scope,
    receive: Receive,
    limit: int = MAX_BODY_BYTES,
    on_bytes: OnBytes = lambda size: None,
) -> bytes | None:
    """Return the whole body; None when the client went away before its end.

    `on_bytes` is told how much has come, each time that some has.

    Raises:
        HttpError: 413, before more than `limit` bytes are kept.
    """
    announced = find_header(scope, b"content-length") or b"0"
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        chunk = event.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        on_bytes(size)
        chunks.append(chunk)
        if not event.get("more_body", False):
            return b"".join(chunks)


def _too_large(limit: int) -> HttpError:
    # The rest of the body is not read, so the connection cannot be used again.
    return HttpError(
        413,
        f"the body is over the limit of {limit} bytes",
        code="body_too_large",
        headers=((b"connection", b"close"),),
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
    await send({"type": "http.response.body", "body": body})


async def lifespan(receive: Receive, send: Send) -> None:
    """Answer the server's start and stop; there is nothing to prepare."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def abort(send: Send) -> bool:
    """Drop the connection, unsent bytes included; False when this server gives no way to.

    ASGI has no word for it: a response cut short is closed only after its buffer was sent, and a
    client that does not read would keep it forever.  uvicorn's `send` is a method of the cycle that
    holds the transport.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        return False
    transport.abort()
    return True
